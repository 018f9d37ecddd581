"""The sizing table's arithmetic against rounds worked out by hand, and the command on `tiny`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gateway import cli
from gateway.bench.sizing import Shares, header, line, sizes
from gateway.core import Tier
from gateway.load import CostTable

FLAT = {Tier.SMALL: CostTable((1,), (10.0,)), Tier.LARGE: CostTable((1,), (50.0,))}
"""Passes that cost the same whatever their size: a GPU far below its knee."""


def test_always_right_drafts_are_as_long_as_they_may() -> None:
    (size,) = sizes(FLAT, Shares(1.0, 1.0, 1), [8], demand=20)
    # 32 drafts: 320 ms of the small model, 50 of the large one, 33 tokens a row.
    assert (size.drafts, size.gateways) == (32, 3)
    assert size.per_row == pytest.approx(33 / 0.370)
    assert size.tokens_per_s == pytest.approx(8 * 33 / 0.370)
    assert size.small_share == pytest.approx(32 / 33)
    assert size.large_busy == pytest.approx(50 / 370)
    assert size.replicas == 1


def test_drafts_that_never_stand_are_not_made() -> None:
    (size,) = sizes(FLAT, Shares(1.0, 0.0, 1), [4], demand=9)
    assert (size.drafts, size.small_share, size.large_busy) == (0, 0.0, 1.0)
    assert size.tokens_per_s == pytest.approx(4 / 0.050)
    # Large-only keeps one replica busy for each gateway.
    assert (size.gateways, size.replicas) == (3, 3)


def test_above_the_knee_the_large_model_alone_is_faster() -> None:
    steep = {Tier.SMALL: CostTable((1, 100), (10.0, 1000.0)), Tier.LARGE: CostTable((1, 100), (20.0, 2000.0))}
    (size,) = sizes(steep, Shares(0.7, 0.9, 1), [64], demand=64)
    assert (size.drafts, size.gateways, size.replicas) == (0, 1, 1)


def test_a_line_has_a_cell_for_each_head() -> None:
    (size,) = sizes(FLAT, Shares(0.5, 0.5, 1), [1], demand=1)
    assert line(size).count("|") == header(1).splitlines()[1].count("|")


def test_the_command_measures_and_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENTAPE_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "sizes.json"
    asked = ["bench", "--preset", "tiny", "--sizing", "100", "--rows", "1,16", "--tokens", "24"]
    assert cli.main([*asked, "--json", str(out)]) == 0
    told = capsys.readouterr().out.splitlines()
    found = json.loads(out.read_text())
    seen = r"exact without lookup, chat: \d+% of \d+ proposals kept, .*accepted"
    assert any(re.fullmatch(seen, said) for said in told)
    assert found["shares"]["proposals"] > 50
    assert [size["gateways"] for size in found["sizes"]] == [100, 7]
    assert told[-2].startswith("| 1 |")
    assert told[-1].startswith("| 16 |")


@pytest.mark.parametrize("value", ["0", "-3"])
def test_a_demand_of_nothing_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--sizing", value]) == 2
    assert capsys.readouterr().err == "tokentape: --sizing: at least 1\n"

"""What a tape teaches, and spot checks."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tape_fakes import Script, record

from gateway.config import ConfigError
from gateway.core import Accept, Outcome
from gateway.intervals import wilson
from gateway.policy import Policy
from gateway.tuning.spotcheck import check, tape_desk, told
from gateway.tuning.tape import labelled, write_disagreements
from logs.recorder import Recorder


class Words:
    """A stand-in for a tokenizer: token 7 is `<7>`."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(f"<{i}>" for i in ids)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    recorder = Recorder(tmp_path / "data", flush_s=3600.0)
    for i, accept in enumerate((Accept.EXACT, Accept.TRUST)):
        record(recorder, Script(Policy(accept=accept), i, request_id=f"r{i}").run())
    recorder.close()
    return tmp_path / "data"


def scripts() -> list[Script]:
    return [
        Script(Policy(accept=accept), i, request_id=f"r{i}").run()
        for i, accept in enumerate((Accept.EXACT, Accept.TRUST))
    ]


def test_labels_of_the_tape_are_examples(data_dir: Path) -> None:
    known = [
        row
        for script in scripts()
        for row in script.rows
        if row.signals is not None
        and row.small_choice is not None
        and row.large_choice is not None
        and row.outcome not in (Outcome.RECOVERED, Outcome.DISCARDED, Outcome.FORCED)
    ]
    found = labelled(data_dir)
    assert len(found) == len(known) > 20
    assert sorted(found.gap.tolist()) == sorted(row.signals.gap for row in known)
    assert int(found.agrees.sum()) == sum(row.small_choice == row.large_choice for row in known)


def test_disagreements_as_training_data(data_dir: Path) -> None:
    file = io.StringIO()
    count = write_disagreements(data_dir, Words(), file)
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    expected = {
        (script.request_id, row.idx, row.small_choice, row.large_choice)
        for script in scripts()
        for row in script.rows
        if None not in (row.small_choice, row.large_choice)
        and row.small_choice != row.large_choice
        and row.outcome is not Outcome.RECOVERED
    }
    assert count == len(lines) == len(expected) > 5
    assert {(x["request_id"], x["idx"], x["small_id"], x["large_id"]) for x in lines} == expected
    for line in lines:
        script = next(s for s in scripts() if s.request_id == line["request_id"])
        written = [row.token_id for row in script.rows if row.written][: line["idx"]]
        assert line["context_ids"] == [1, 2, 3, *written]
        assert line["context"].startswith("<1><2><3>")
        assert line["large"] == f"<{line['large_id']}>"


def test_a_tape_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be opened"):
        labelled(tmp_path)


def answers(*lines: str) -> Callable[[str], str]:
    given: Iterator[str] = iter(lines)

    def ask(_: str) -> str:
        try:
            return next(given)
        except StopIteration:
            raise EOFError from None

    return ask


def test_verdicts_go_on_the_tape(data_dir: Path) -> None:
    shown: list[str] = []
    with tape_desk(data_dir) as desk:
        counts = check(desk, 5, "ada", answers("x", "g fine so far", "b"), shown.append)
    assert counts == {"good": 1, "bad": 1, "unsure": 0}
    assert sum("ANSWER" in line for line in shown) == 2
    assert any("'x'" in line for line in shown)
    reader = Recorder(data_dir)
    try:
        kept = (
            reader.reader().query("SELECT verdict, note, reviewer FROM reviews ORDER BY verdict").to_pylist()
        )
        assert kept == [
            {"verdict": "bad", "note": None, "reviewer": "ada"},
            {"verdict": "good", "note": "fine so far", "reviewer": "ada"},
        ]
        # What was rated is not drawn again.
        assert reader.feedback().sample(5) == []
    finally:
        reader.close()


def test_skipping_and_stopping(data_dir: Path) -> None:
    with tape_desk(data_dir) as desk:
        assert sum(check(desk, 5, None, answers("", "q"), lambda _: None).values()) == 0
        assert check(desk, 5, None, answers("u"), lambda _: None)["unsure"] == 1


def test_the_interval_is_wilsons() -> None:
    low, high = wilson(0.9, 20)
    assert told({"good": 18, "bad": 2, "unsure": 1}) == (
        f"good 90.0% of 20 [{low:.1%}, {high:.1%}] at 95 % (Wilson); 1 unsure"
    )
    assert "no verdicts" in told({"good": 0, "bad": 0, "unsure": 3})

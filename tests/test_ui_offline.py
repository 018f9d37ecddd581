"""The tape read by the UI while no gateway runs: the live file, the closed segments, nothing at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from tape_fakes import Script, record

from gateway.policy import Policy
from logs.reader import Reader
from logs.recorder import Recorder
from replay_ui.client import Gateway, Problem
from replay_ui.rules import policy_of, verdict
from replay_ui.steps import Steps

DOWN = "http://127.0.0.1:9"


@pytest.fixture
def tape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two traces in closed segments, one in the live file, and nobody holding it."""
    recorder = Recorder(tmp_path, flush_s=3600.0)
    record(recorder, Script(Policy(), seed=1, request_id="first").run())
    record(recorder, Script(Policy(), seed=2, request_id="second").run())
    recorder.compact()
    record(recorder, Script(Policy(), seed=3, request_id="third").run())
    recorder.close()
    monkeypatch.setenv("TOKENTAPE_LOGS_DATA_DIR", str(tmp_path))
    return tmp_path


def test_the_newest_first_page_by_page(tape: Path) -> None:
    gateway = Gateway(DOWN)
    rows, cursor = gateway.traces(limit=2)
    assert gateway.offline
    assert [row["id"] for row in rows] == ["third", "second"]
    rows, cursor = gateway.traces(limit=2, cursor=cursor)
    assert [row["id"] for row in rows] == ["first"]
    assert cursor is None


def test_a_fleets_share_is_read_as_one_tape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, name in enumerate(("east", "west")):
        recorder = Recorder(tmp_path / name, gateway=name, share=str(tmp_path / "share"))
        record(recorder, Script(Policy(), seed=seed, request_id=f"of-{name}").run())
        recorder.close()
    monkeypatch.setenv("TOKENTAPE_LOGS_DATA_DIR", str(tmp_path / "share"))
    gateway = Gateway(DOWN)
    rows, _ = gateway.traces()
    assert [(row["id"], row["gateway"]) for row in rows] == [("of-west", "west"), ("of-east", "east")]
    assert [row["id"] for row in gateway.traces(gateway="east")[0]] == ["of-east"]
    assert len(gateway.steps("of-west")["seq"]) > 10


def test_a_trace_is_what_the_tapes_own_reader_says(tape: Path) -> None:
    gateway = Gateway(DOWN)
    reader = Reader.open(tape)
    for name in ("first", "third"):
        expected = reader.trace(name)
        assert expected is not None
        found = gateway.trace(name)
        for column in ("completion_tokens", "policy", "finish_reason", "arm", "policy_hash", "gap_spark"):
            assert found[column] == expected[column]
        steps = Steps.read(gateway.steps(name))
        table = reader.steps(name).to_pydict()
        assert steps.column("token_id") == table["token_id"]
        assert steps.tokens == table["token_bytes"]
        policy = policy_of(found)
        assert policy is not None
        assert all(verdict(policy, steps.row(i)).agrees is not False for i in range(len(steps)))
    reader.close()


def test_segments_are_read_while_the_live_file_is_held(tape: Path) -> None:
    holder = Recorder(tape)
    try:
        rows, _ = Gateway(DOWN).traces()
        assert [row["id"] for row in rows] == ["second", "first"]
    finally:
        holder.close()


def test_filters_hold_here_too(tape: Path) -> None:
    gateway = Gateway(DOWN)
    assert gateway.traces(arm="canary")[0] == []
    assert [row["id"] for row in gateway.traces(q="THIRD")[0]] == ["third"]


def test_an_unknown_trace_is_absent_and_what_needs_a_gateway_is_down(tape: Path) -> None:
    gateway = Gateway(DOWN)
    with pytest.raises(Problem) as absent:
        gateway.trace("nope")
    assert absent.value.kind == "absent"
    with pytest.raises(Problem) as down:
        gateway.what_if("first", {"threshold": 0.9})
    assert down.value.kind == "down"
    assert gateway.texts([1, 2]) == {}


def test_without_a_directory_the_gateway_is_simply_down(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TOKENTAPE_LOGS_DATA_DIR", raising=False)
    with pytest.raises(Problem) as caught:
        Gateway(DOWN).traces()
    assert caught.value.kind == "down"
    monkeypatch.setenv("TOKENTAPE_LOGS_DATA_DIR", str(tmp_path))
    with pytest.raises(Problem) as caught:
        Gateway(DOWN).traces()
    assert caught.value.kind == "down"

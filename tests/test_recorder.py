"""The writer: what it is handed is on disk soon, or counted; it never blocks and never corrupts."""

import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from tape_fakes import SERVED, Script, finished, passed, record, request, step

from gateway.core import (
    Action,
    AuditStatus,
    MiddleView,
    Outcome,
    Reason,
    Settled,
    Signals,
    Tick,
    Tier,
    TopK,
    Verdict,
)
from gateway.policy import Policy
from gateway.request import Trace
from logs.reader import Reader
from logs.recorder import Recorder
from logs.rows import Capture
from logs.tape import TapeBusy, TapeUnwritable

NEVER = 3600.0
"""A flush interval that no test waits for."""


@pytest.fixture
def recorder(tmp_path):
    recorder = Recorder(tmp_path, flush_s=NEVER)
    yield recorder
    recorder.close()


def trace(id="r", **fields):
    return Trace(request(id, **fields), SERVED)


def test_an_id_is_taken_once_it_is_on_disk(recorder):
    recorder.on_admit(trace())
    before = recorder.has("r")
    recorder.flush()
    assert (before, recorder.has("r"), recorder.has("other")) == (False, True, False)


def test_a_step_comes_back_as_it_was_written(recorder):
    recorder.on_admit(trace())
    written = step(
        "r", 0, signals=Signals(0.75, 0.5, 1.25, None, b"\x00\x3c"), small_topk=TopK((7, 8), (-0.25, -3.0)),
        large_signals=Signals(0.5, 0.25, 1.5, 0.125), token_bytes=b"\xff\x00", probe_u=0.5, propensity=0.25,
    )  # fmt: skip
    recorder.on_tick(Tick(0, passed(), [], [written]))

    row = recorder.reader().steps("r").to_pylist()[0]

    assert (row["top1_p"], row["gap"], row["entropy"], row["attn_entropy"]) == (0.75, 0.5, 1.25, None)
    assert (row["small_topk_ids"], row["small_topk_logprobs"]) == ([7, 8], [-0.25, -3.0])
    assert (row["hidden"], row["large_entropy"], row["large_attn_entropy"]) == (b"\x00\x3c", 1.5, 0.125)
    said = (
        "top1_p",
        "gap",
        "entropy",
        "attn_entropy",
        "hidden",
        "large_entropy",
        "large_attn_entropy",
        "middle",
    )
    plain = [n for n in row if n not in said and "topk" not in n]
    assert {n: getattr(written, n) for n in plain} == {n: row[n] for n in plain}
    assert row["middle"] is None


def test_a_middle_tiers_view_comes_back_as_it_was_written(recorder):
    recorder.on_admit(trace())
    view = MiddleView(
        tier=Tier.MIDDLE, verdict=Verdict.RECOVERED, choice=9, p=0.5, signals=Signals(0.5, 0.25, 1.5),
        topk=TopK((9, 8), (-0.5, -2.0)), action=Action.KEEP, reason=Reason.CONFIDENT, score=0.25,
        threshold=0.125, draft_pos=1, draft_limit=4, run_length=2, ema_acceptance=0.75, guard_value=0.0,
        probe_u=None, fact_value=0.0, decision_no=7, pass_id=3,
    )  # fmt: skip
    recorder.on_tick(Tick(0, passed(), [], [step("r", 0, middle=(view,), decision_no=6)]))

    row = recorder.reader().steps("r").to_pylist()[0]

    (got,) = row["middle"]
    assert (got["top1_p"], got["gap"], got["entropy"], got["attn_entropy"]) == (0.5, 0.25, 1.5, None)
    assert (got["topk_ids"], got["topk_logprobs"]) == ([9, 8], [-0.5, -2.0])
    plain = [n for n in got if hasattr(view, n)]
    assert {n: getattr(view, n) for n in plain} == {n: got[n] for n in plain}
    assert row["decision_no"] == 6


def test_floats_are_stored_as_float32_exactly(recorder):
    script = Script(Policy(), seed=3).run()
    record(recorder, script)

    gaps = recorder.reader().steps("r").column("gap").to_pylist()

    assert [s.signals.gap for s in script.rows] == gaps


def test_a_passes_row_comes_back(recorder):
    recorder.on_tick(Tick(4, passed(9, tick=4, rows=3, ms=1.5)))
    recorder.flush()

    rows = recorder.cursor().execute("SELECT pass_id, tick, tier, rows, ms FROM passes").fetchall()

    assert rows == [(9, 4, "large", 3, 1.5)]


@pytest.mark.parametrize("flushed_between", [False, True])
def test_the_last_word_on_a_step_wins(recorder, flushed_between):
    recorder.on_admit(trace())
    kept = step("r", 0, outcome=Outcome.KEPT, tier=Tier.SMALL, large_choice=None, audit_agrees=None)
    recorder.on_tick(Tick(0, None, [], [kept, step("r", 1)]))
    if flushed_between:
        recorder.flush()
    recorder.on_tick(Tick(1, None, [], [], [structs.replace(kept, large_choice=70, audit_agrees=False)]))

    rows = recorder.reader().steps("r").select(["seq", "large_choice", "audit_agrees"]).to_pylist()

    assert [row["seq"] for row in rows] == [0, 1]
    assert (rows[0]["large_choice"], rows[0]["audit_agrees"]) == (70, False)


def test_a_request_is_listed_from_admission_and_final_at_its_end(recorder):
    reader = recorder.reader()
    recorder.on_admit(trace())

    assert None is reader.trace("r")["finish_reason"]

    record(recorder, Script(Policy(protect_first=2), seed=1).run())
    summary = reader.trace("r")

    assert (summary["finish_reason"], summary["num_choices"]) == ("length", 1)
    assert summary["small_tokens"] + summary["large_tokens"] == summary["completion_tokens"]
    assert (summary["incomplete"], summary["interrupted"]) == (False, False)


def test_the_answer_is_the_written_tokens(recorder):
    script = Script(Policy(), seed=5).run()
    record(recorder, script)

    assert bytes(script.output).decode() == recorder.reader().trace("r")["answer_text"]


def test_prompt_and_answer_are_decoded_where_a_tokenizer_is_given(tmp_path):
    recorder = Recorder(tmp_path, decode=lambda ids: " ".join(map(str, ids)))
    script = Script(Policy(), num_tokens=5).run()
    record(recorder, script)

    summary = recorder.reader().trace("r")
    recorder.close()

    assert tuple(summary[n] for n in ("prompt_text", "prompt_ids", "prompt_preview")) == (
        "1 2 3",
        [1, 2, 3],
        "hello",
    )
    assert " ".join(map(str, script.output)) == summary["answer_text"]


def test_text_that_utf8_cannot_hold_is_recorded_all_the_same(recorder):
    params = {"messages": [{"role": "user", "content": "a\ud800b"}], "user": "\udfff"}
    recorder.on_admit(trace(params=params))

    summary = recorder.reader().trace("r")

    assert ("a?b", params) == (summary["prompt_preview"], summary["params"])


def test_a_late_audit_reaches_the_request_row(recorder):
    kept = step("r", 0, outcome=Outcome.KEPT, tier=Tier.SMALL, audit_agrees=None)
    recorder.on_admit(trace())
    recorder.on_tick(Tick(0, None, [], [kept]))
    recorder.on_finish(replace(trace(), finished=finished()))
    before = recorder.reader().trace("r")
    label = structs.replace(kept, audit_agrees=True, audit_source="posthoc")
    recorder.on_tick(Tick(1, None, [], [], [label], [Settled("r", 0, AuditStatus.COMPLETE)]))
    after = recorder.reader().trace("r")

    names = ("audit_status", "audited_tokens", "audit_agreements")
    assert tuple(before[n] for n in names) == (None, 0, 0)
    assert tuple(after[n] for n in names) == ("complete", 1, 1)


def test_a_choice_may_settle_in_the_tick_that_ends_it(recorder):
    recorder.on_admit(trace())
    recorder.on_tick(Tick(0, None, [], [step("r", 0)], [], [Settled("r", 0, AuditStatus.NOT_CHOSEN)]))
    recorder.on_finish(replace(trace(), finished=finished()))
    summary = recorder.reader().trace("r")

    assert (summary["audit_status"], summary["answer_text"]) == ("not_chosen", "A")


def test_a_full_queue_drops_whole_requests_and_says_so(tmp_path):
    recorder = Recorder(tmp_path, queue_rows=6, flush_rows=1000, flush_s=NEVER)
    recorder.on_admit(trace("a"))
    recorder.on_admit(trace("b"))
    recorder.on_tick(Tick(0, None, [], [step("a", 0), step("b", 0)]))
    recorder.on_tick(Tick(1, None, [], [step("a", 1), step("a", 2), step("a", 3)]))
    assert dict(recorder.dropped) == {"queue_full": 3}
    recorder.on_tick(Tick(2, None, [], [step("a", 4), step("b", 1)]))
    recorder.on_finish(replace(trace("a"), finished=finished()))
    recorder.on_finish(replace(trace("b"), finished=finished()))

    reader = recorder.reader()
    a, b = reader.trace("a"), reader.trace("b")

    assert (a["incomplete"], b["incomplete"]) == (True, False)
    assert tuple(reader.steps(id).column("seq").to_pylist() for id in ("a", "b")) == ([0], [0, 1])
    assert (dict(recorder.dropped), recorder.queue_depth) == ({"queue_full": 4}, 0)
    recorder.close()


def test_a_failed_write_costs_rows_and_nothing_else(recorder, monkeypatch):
    recorder.on_admit(trace("a"))
    recorder.on_tick(Tick(0, None, [], [step("a", 0)]))
    recorder.flush()
    with monkeypatch.context() as broken:
        broken.setattr("logs.batch.step_table", lambda *_: 1 / 0)
        recorder.on_tick(Tick(1, None, [], [step("a", 1), step("a", 2)]))
        recorder.flush()
    recorder.on_tick(Tick(2, None, [], [step("a", 3)]))
    recorder.on_finish(replace(trace("a"), finished=finished()))
    recorder.on_admit(trace("b"))
    recorder.on_tick(Tick(3, None, [], [step("b", 0)]))
    reader = recorder.reader()

    assert tuple(reader.steps(id).column("seq").to_pylist() for id in ("a", "b")) == ([0], [0])
    assert True is reader.trace("a")["incomplete"]
    assert dict(recorder.dropped) == {"write_error": 2, "incomplete": 1}


def test_commits_when_rows_are_many_without_waiting(tmp_path):
    written = []
    recorder = Recorder(tmp_path, flush_rows=10, flush_s=NEVER, on_flush=written.append)
    record(recorder, Script(Policy(), num_tokens=100).run())
    recorder.close()

    assert len(written) >= 8


def test_commits_when_time_has_passed(tmp_path):
    recorder = Recorder(tmp_path, flush_s=0.0)
    recorder.on_admit(trace())
    recorder.close()

    assert Reader.open(tmp_path).trace("r")["request_id"] == "r"


def test_no_prompt_keeps_the_output_only(tmp_path):
    recorder = Recorder(tmp_path, capture=Capture.NO_PROMPT, decode=lambda ids: "secret")
    record(recorder, Script(Policy()).run())
    summary = recorder.reader().trace("r")
    recorder.close()

    assert tuple(summary[n] for n in ("prompt_ids", "prompt_text", "prompt_preview", "params")) == (
        None,
        None,
        None,
        {},
    )
    assert summary["prompt_tokens"] == 3


def test_signals_keeps_no_text_and_no_token_ids(tmp_path):
    recorder = Recorder(tmp_path, capture=Capture.SIGNALS, decode=lambda ids: "secret")
    script = Script(Policy()).run()
    given = script.trace()
    params = {"messages": [{"content": "secret"}], "temperature": 0.5, "stop": "secret", "user": "secret"}
    given = replace(given, request=replace(given.request, params=params))
    recorder.on_admit(given)
    recorder.on_tick(Tick(0, None, [], script.rows))
    recorder.on_finish(given)
    reader = recorder.reader()
    summary, steps = reader.trace("r"), reader.steps("r")
    recorder.close()

    assert "secret" not in repr(summary)
    assert summary["params"] == {"temperature": 0.5}
    for name in (
        "token_id",
        "token_bytes",
        "small_choice",
        "large_choice",
        "small_topk_ids",
        "large_topk_ids",
    ):
        assert len(steps) == steps.column(name).null_count
    assert [s.guard_value for s in script.rows] == steps.column("guard_value").to_pylist()


def test_trace_numbers_go_on_where_the_last_process_ended(tmp_path):
    for id in ("a", "b", "c"):
        recorder = Recorder(tmp_path)
        recorder.on_admit(trace(id))
        recorder.close()

    page, _ = Reader.open(tmp_path).traces()

    assert [(row["request_id"], row["trace_no"]) for row in page] == [("c", 3), ("b", 2), ("a", 1)]


def test_a_second_process_is_refused_by_name(recorder, tmp_path):
    with pytest.raises(TapeBusy, match=f"in use by another process \\(PID {os.getpid()}\\)"):
        Recorder(tmp_path)


def test_a_directory_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(TapeUnwritable, match="cannot be written"):
        Recorder(tmp_path / "file" / "data")


def damaged_copy(recorder, folder, name, start):
    """The open tape's files as a crash would leave them, with bytes of one of them overwritten."""
    recorder.on_admit(trace("before"))
    recorder.flush()
    folder.mkdir()
    for file in recorder.data_dir.glob("tape.duckdb*"):
        (folder / file.name).write_bytes(file.read_bytes())
    content = bytearray((folder / name).read_bytes())
    content[start : start + 64] = b"\xff" * 64
    (folder / name).write_bytes(content)


@pytest.mark.parametrize(("name", "start"), [("tape.duckdb", 0), ("tape.duckdb.wal", 200)])
def test_damage_is_set_aside_and_the_tape_starts(recorder, tmp_path, name, start):
    folder = tmp_path / "crashed"
    damaged_copy(recorder, folder, name, start)

    again = Recorder(folder)
    again.on_admit(trace("after"))
    reader = again.reader()
    found = (reader.has("before"), reader.has("after"))
    again.close()

    assert name in [path.name.rsplit(".", 1)[0] for path in again.quarantined]
    assert all(path.parent == folder / "quarantine" for path in again.quarantined)
    assert found == (False, True)


KILLED = """
    import sys
    from pathlib import Path
    from dataclasses import replace
    from gateway.core import Tick
    from gateway.policy import Policy
    from logs.recorder import Recorder
    from tape_fakes import Script, passed

    recorder = Recorder(Path(sys.argv[1]), flush_s=0.05)
    script = Script(Policy(), num_tokens=600).run()
    recorder.on_admit(replace(script.trace(), finished=None))
    for number, step in enumerate(script.rows[:200]):
        recorder.on_tick(Tick(number, passed(number), [], [step]))
    recorder.flush()
    print("flushed", flush=True)
    for number, step in enumerate(script.rows[200:], start=200):
        recorder.on_tick(Tick(number, passed(number), [], [step]))
    print("handed over", flush=True)
    sys.stdin.read()
"""


def test_kill_9_loses_only_what_was_not_committed(tmp_path):
    """Killed with rows in flight: the next start opens the tape, a prefix is there, nothing is corrupt."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        assert process.stdout.readline() == "flushed\n"
        assert process.stdout.readline() == "handed over\n"
        process.send_signal(signal.SIGKILL)
        process.wait()

    recorder = Recorder(tmp_path)
    reader = recorder.reader()
    summary, steps = reader.trace("r"), reader.steps("r")
    recorder.close()

    expected = Script(Policy(), num_tokens=600).run().rows
    assert recorder.quarantined == ()
    assert (summary["finish_reason"], summary["interrupted"]) == (None, True)
    assert 200 <= len(steps) <= len(expected)
    assert [s.token_id for s in expected[: len(steps)]] == steps.column("token_id").to_pylist()

"""Reading the tape back: pages, filters, one trace, its steps."""

from dataclasses import replace

import pytest
from tape_fakes import SERVED, Script, finished, record, request, step

from gateway.core import Counts, FinishReason, Outcome, Tick, Tier
from gateway.policy import Policy
from gateway.request import Trace
from logs.reader import BadCursor, TraceFilter
from logs.recorder import Recorder


@pytest.fixture
def recorder(tmp_path):
    recorder = Recorder(tmp_path, flush_s=3600.0)
    yield recorder
    recorder.close()


def put(recorder, id, choice=0, end=None, **fields):
    trace = Trace(request(id, choice, **fields), SERVED)
    recorder.on_admit(trace)
    if end is not None:
        recorder.on_finish(replace(trace, finished=end))


def ids(page):
    return [row["request_id"] for row in page]


def test_pages_are_newest_first_without_gap_or_repeat(recorder):
    for i in range(7):
        put(recorder, f"r{i}")
    reader, seen, cursor = recorder.reader(), [], None
    for _ in range(3):
        page, cursor = reader.traces(limit=3, cursor=cursor)
        seen.append(ids(page))
        # What comes in while someone is paging does not shift the pages.
        put(recorder, f"late{len(seen)}")

    assert seen == [["r6", "r5", "r4"], ["r3", "r2", "r1"], ["r0"]]
    assert None is cursor


def test_a_clock_that_jumps_back_does_not_reorder_traces(recorder):
    for id, received in (("first", 5000.0), ("second", 10.0)):
        put(recorder, id, received=received)

    assert ids(recorder.reader().traces()[0]) == ["second", "first"]


@pytest.mark.parametrize("cursor", ["", "x", "-1", "1;", "٣", "9" * 30])
def test_a_foreign_cursor_is_refused(recorder, cursor):
    with pytest.raises(BadCursor):
        recorder.reader().traces(cursor=cursor)


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (TraceFilter(), ["c", "b", "a"]),
        (TraceFilter(arm="canary"), ["b"]),
        (TraceFilter(finish_reason="stop"), ["b", "a"]),
        (TraceFilter(since=2000.0), ["c", "b"]),
        (TraceFilter(until=2000.0), ["a"]),
        (TraceFilter(since=2000.0, until=3000.0), ["b"]),
        (TraceFilter(min_guard_hits=2), ["b"]),
        (TraceFilter(max_acceptance=0.5), ["a"]),
        (TraceFilter(arm="stable", finish_reason="stop"), ["a"]),
        (TraceFilter(q="PYTHON"), ["a"]),
        (TraceFilter(q="answer x"), ["b"]),
        (TraceFilter(q="C"), ["c"]),
        (TraceFilter(q="100%_'"), []),
    ],
)
def test_filters(three_traces, filters, expected):
    page, _ = three_traces.reader().traces(filters=filters)

    assert ids(page) == expected


@pytest.fixture(scope="module")
def three_traces(tmp_path_factory):
    texts = {1: "in Python", 2: "", 9: "Answer X"}
    recorder = Recorder(tmp_path_factory.mktemp("tape"), decode=lambda ids: texts[ids[0]] if ids else "")
    half = Counts(num_draft_tokens=4, num_accepted_draft_tokens=2, guard_hits=1)
    put(recorder, "a", end=finished(counts=half), received=1000.0, prompt_ids=(1,))
    counts = Counts(num_draft_tokens=4, num_accepted_draft_tokens=4, guard_hits=2)
    trace = Trace(request("b", received=2000.0, arm="canary", prompt_ids=(2,)), SERVED)
    recorder.on_admit(trace)
    recorder.on_tick(Tick(0, None, [], [step("b", 0, token_id=9)]))
    recorder.on_finish(replace(trace, finished=finished(counts=counts)))
    put(recorder, "c", received=3000.0, prompt_ids=(2,))
    yield recorder
    recorder.close()


def test_choices_of_a_request_are_one_trace(recorder):
    put(recorder, "other")
    for choice in range(3):
        put(
            recorder,
            "r",
            choice,
            end=finished(FinishReason.LENGTH, Counts(small_tokens=choice, large_tokens=1)),
        )
    page, _ = recorder.reader().traces()

    assert ids(page) == ["r", "other"]
    assert (page[0]["num_choices"], page[0]["totals"]["completion_tokens"]) == (3, 6)
    assert [choice["choice"] for choice in page[0]["choices"]] == [0, 1, 2]


def test_a_page_carries_previews_and_leaves_the_bulk_out(tmp_path):
    recorder = Recorder(tmp_path, decode=lambda ids: "x" * 5000)
    record(recorder, Script(Policy()).run())
    page, _ = recorder.reader().traces()
    recorder.close()

    assert (page[0]["prompt_preview"], page[0]["answer_preview"]) == ("hello", "x" * 200)
    assert not {"prompt_ids", "prompt_text", "answer_text", "params"} & set(page[0])


def test_policy_and_parameters_are_parsed(recorder):
    policy = Policy(threshold=0.7)
    put(recorder, "r", policy=policy)
    summary = recorder.reader().trace("r")

    assert (0.7, 64, policy.hash) == (
        summary["policy"]["threshold"], summary["sampling"]["max_tokens"], summary["policy_hash"],
    )  # fmt: skip


def test_steps_in_seq_order_and_by_position(recorder):
    put(recorder, "r")
    rows = [
        step("r", 0, idx=0),
        step("r", 1, idx=1, outcome=Outcome.REJECTED, tier=Tier.SMALL),
        step("r", 2, idx=1, outcome=Outcome.RECOVERED),
        step("r", 3, idx=2),
    ]
    recorder.on_tick(Tick(0, None, [], rows))
    reader = recorder.reader()

    assert reader.steps("r").column("seq").to_pylist() == [0, 1, 2, 3]
    assert reader.steps("r", start=1, stop=2).column("seq").to_pylist() == [1, 2]
    assert reader.steps("r", start=2).column("seq").to_pylist() == [3]
    assert (len(reader.steps("r", choice=1)), len(reader.steps("nobody"))) == (0, 0)


def test_an_unknown_trace_is_none(recorder):
    put(recorder, "r")
    reader = recorder.reader()

    assert (reader.trace("nobody"), reader.has("nobody"), reader.has("r")) == (None, False, True)


def test_every_choice_gives_each_its_own_rows(recorder):
    scripts = [Script(Policy(), seed=i, num_tokens=5 + i, request_id=f"r{i}").run() for i in range(4)]
    for script in scripts:
        record(recorder, script)
    put(recorder, "empty")

    found = [
        (row["request_id"], table["seq"].to_pylist())
        for row, table in recorder.reader().every_choice(["seq"])
    ]

    assert [(s.request_id, list(range(len(s.rows)))) for s in scripts] + [("empty", [])] == found

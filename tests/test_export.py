"""Traces as files, numbers of a tape, reviews and scores."""

import base64
import io
import json

import pyarrow.parquet as pq
import pytest
from tape_fakes import SERVED, Script, record, request

from gateway.core import Accept
from gateway.policy import Policy
from gateway.replay import replay
from gateway.request import Trace
from logs.export import export_all, export_trace, stats
from logs.recorder import Recorder


@pytest.fixture
def recorder(tmp_path):
    recorder = Recorder(tmp_path / "data", flush_s=3600.0)
    for i, accept in enumerate((Accept.EXACT, Accept.TRUST)):
        record(recorder, Script(Policy(accept=accept), i, request_id=f"r{i}").run())
    yield recorder
    recorder.close()


def test_jsonl_is_the_request_and_its_steps(recorder):
    reader, file = recorder.reader(), io.BytesIO()

    assert export_trace(reader, "r0", file, "jsonl")

    first, *rest = [json.loads(line) for line in file.getvalue().splitlines()]
    steps = reader.steps("r0").to_pylist()
    assert first["request"]["request_id"] == "r0"
    assert [line["step"]["token_id"] for line in rest] == [step["token_id"] for step in steps]
    assert base64.b64decode(rest[0]["step"]["token_bytes"]) == steps[0]["token_bytes"]


def test_parquet_replays_on_its_own(recorder):
    file = io.BytesIO()

    assert export_trace(recorder.reader(), "r1", file, "parquet")

    table = pq.read_table(io.BytesIO(file.getvalue()))
    metadata = pq.read_metadata(io.BytesIO(file.getvalue())).metadata
    (row,) = json.loads(metadata[b"requests"])
    result = replay(row, table)
    assert (result.mismatches, result.decisions > 50) == ([], True)


def test_an_unknown_trace_writes_nothing(recorder):
    file = io.BytesIO()

    assert not export_trace(recorder.reader(), "nobody", file, "jsonl")
    assert file.getvalue() == b""


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_the_whole_tape_live_and_closed(recorder, tmp_path, format):
    recorder.compact()
    record(recorder, Script(Policy(), 7, request_id="live").run())
    path = tmp_path / "out"

    assert export_all(recorder.reader(), path, format) == 3
    with pytest.raises(FileExistsError):
        export_all(recorder.reader(), path, format)
    if format == "parquet":
        assert len(set(pq.read_table(path)["request_id"].to_pylist())) == 3
    else:
        assert sum(line.startswith(b'{"request"') for line in path.read_bytes().splitlines()) == 3


def test_numbers_of_the_tape(recorder):
    reader = recorder.reader()
    before = stats(reader)
    recorder.compact()
    recorder.on_admit(Trace(request("running"), SERVED))
    after = stats(reader)

    steps = sum(len(reader.steps(id)) for id in ("r0", "r1"))
    assert (before["requests"], before["steps"], before["segments"]) == (2, steps, 0)
    assert (after["requests"], after["steps"], after["segments"]) == (3, steps, 1)
    assert after["segment_steps"] == steps
    assert after["finish_reasons"] == {"length": 2, "unfinished": 1}
    assert (after["segment_bytes"] > 0, after["file_bytes"] > 0, after["since"]) == (True, True, 1000.0)


def test_reviews_and_scores_are_on_the_trace(recorder):
    feedback, reader = recorder.feedback(), recorder.reader()
    feedback.review("r0", "bad", "wrong year", "kim")
    feedback.score("r0", "exact match", 0.25)
    recorder.compact()
    summary = reader.trace("r0")

    (review,), (score,) = summary["reviews"], summary["scores"]
    assert (review["verdict"], review["note"], review["reviewer"]) == ("bad", "wrong year", "kim")
    assert (score["name"], score["value"]) == ("exact match", 0.25)
    assert reader.trace("r1")["reviews"] == []


def test_reviews_are_drawn_from_what_is_finished_and_unreviewed(recorder):
    recorder.on_admit(Trace(request("running"), SERVED))
    feedback = recorder.feedback()
    drawn = {summary["id"] for summary in feedback.sample(50)}
    feedback.review("r0", "good")

    assert drawn == {"r0", "r1"}
    assert [summary["id"] for summary in feedback.sample(50)] == ["r1"]
    assert feedback.sample(0) == []

"""Closed hours as Parquet: nothing is lost, nothing is doubled, wherever the process dies."""

import os
import shutil
from dataclasses import replace

import pytest
from tape_fakes import SERVED, Script, request

from gateway.core import AuditStatus, Settled, Tick
from gateway.policy import Policy
from gateway.request import Trace
from logs import segments
from logs.reader import Reader, TraceFilter
from logs.recorder import Recorder
from logs.upkeep import Keep, Upkeep

HOUR = 3600.0
NOW = 500 * HOUR + 1800


def put(recorder, id, ended, seed=0, settled=True):
    """A finished trace of about 20 tokens."""
    script = Script(Policy(protect_first=2), seed, num_tokens=20, request_id=id).run()
    trace = script.trace()
    given = replace(trace.request, received=ended - 1)
    done = replace(trace.finished, timings=replace(trace.finished.timings, finished=ended))
    recorder.on_admit(Trace(given, SERVED))
    recorder.on_tick(Tick(0, None, [], script.rows))
    recorder.on_finish(Trace(given, SERVED, done))
    if settled:
        recorder.on_tick(Tick(1, None, settled=[Settled(id, 0, AuditStatus.NOT_CHOSEN)]))
    return script


def upkeep(recorder, now=NOW, **keep):
    recorder.flush()
    return Upkeep(recorder.cursor, recorder.data_dir, recorder._writing, Keep(**keep), clock=lambda: now)


def everything(reader):
    """All that the tape says, as plain values."""
    page, _ = reader.traces(limit=1000)
    ids = [row["request_id"] for row in page]
    return {
        id: (row, reader.trace(id), reader.steps(id).to_pylist()) for id, row in zip(ids, page, strict=True)
    }


@pytest.fixture
def recorder(tmp_path):
    recorder = Recorder(tmp_path, flush_s=HOUR)
    yield recorder
    recorder.close()


def live(recorder, table):
    return recorder.cursor().execute(f"SELECT count(*) FROM {table}").fetchone()[0]


def test_closed_hours_move_and_read_as_before(recorder):
    put(recorder, "a", NOW - 3 * HOUR, 1)
    put(recorder, "b", NOW - 3 * HOUR, 2)
    put(recorder, "c", NOW - 60, 3)
    before = everything(recorder.reader())

    made, _ = upkeep(recorder).run_once()

    assert [(s.num_requests, s.first_no, s.last_no) for s in made] == [(2, 1, 2)]
    assert (live(recorder, "requests"), live(recorder, "moved")) == (1, 2)
    assert everything(recorder.reader()) == before
    assert recorder.reader().has("a")


def test_one_partition_a_day(recorder):
    for day in range(3):
        put(recorder, f"d{day}", NOW - 24 * HOUR * (day + 1))

    made, _ = upkeep(recorder).run_once()

    # 500 hours after the epoch is the 21st of January.
    assert [s.dt for s in made] == ["1970-01-18", "1970-01-19", "1970-01-20"]
    folders = {path.parent.name for path in recorder.data_dir.glob("segments/steps/*/*.parquet")}
    assert folders == {f"dt={s.dt}" for s in made}


def test_what_is_not_over_stays(recorder):
    put(recorder, "unsettled", NOW - 1900, settled=False)
    recorder.on_admit(Trace(request("running", received=NOW - 9 * HOUR), SERVED))

    assert upkeep(recorder).run_once() == ([], [])


def test_a_full_live_table_does_not_wait_for_the_hour(recorder):
    put(recorder, "a", NOW - 120)
    put(recorder, "just now", NOW - 5)

    assert upkeep(recorder).run_once()[0] == []
    assert [s.num_requests for s in upkeep(recorder, segment_bytes=-1).run_once()[0]] == [1]


def test_a_clock_that_jumped_back_keeps_nothing_live_for_ever(recorder):
    put(recorder, "future", NOW + 48 * HOUR)

    assert [s.num_requests for s in upkeep(recorder).run_once()[0]] == [1]


def test_pages_and_filters_span_live_rows_and_segments(recorder):
    for i in range(12):
        put(recorder, f"r{i}", NOW - (20 - i) * HOUR, i)
        if i in (2, 3, 5, 6, 8, 9):
            upkeep(recorder).run_once()
    put(recorder, "live", NOW)
    reader, seen, cursor = recorder.reader(), [], None
    while True:
        page, cursor = reader.traces(limit=4, cursor=cursor)
        seen += [row["request_id"] for row in page]
        if cursor is None:
            break

    assert len(reader.segments()) == 6
    assert seen == ["live", *(f"r{i}" for i in reversed(range(12)))]
    old = TraceFilter(until=NOW - 18 * HOUR)
    assert [row["request_id"] for row in reader.traces(limit=2, filters=old)[0]] == ["r2", "r1"]
    rows = [row["request_id"] for row, _ in reader.every_choice(["seq"])]
    assert rows == [*(f"r{i}" for i in range(12)), "live"]


def test_segments_read_without_the_live_file(recorder):
    put(recorder, "a", NOW - 3 * HOUR)
    upkeep(recorder).run_once()
    before = everything(recorder.reader())
    recorder.close()
    for file in recorder.data_dir.glob("tape.duckdb*"):
        file.unlink()

    reader = Reader.open(recorder.data_dir)

    assert everything(reader) == before
    assert [row["request_id"] for row, _ in reader.every_choice(["seq"])] == ["a"]


def test_a_new_tape_adopts_the_segments_and_numbers_on(recorder):
    put(recorder, "a", NOW - 3 * HOUR)
    upkeep(recorder).run_once()
    before = everything(recorder.reader())
    recorder.close()
    (recorder.data_dir / "tape.duckdb").write_bytes(b"damaged" * 1000)

    again = Recorder(recorder.data_dir)
    after = everything(again.reader())
    again.on_admit(Trace(request("b"), SERVED))
    number = again.reader().trace("b")["trace_no"]
    again.close()

    assert (after, number) == (before, 2)
    assert len(again.quarantined) == 1


@pytest.mark.parametrize("at", ["steps", "passes", "requests", "delete"])
def test_a_move_cut_short_neither_loses_nor_doubles(recorder, tmp_path, monkeypatch, at):
    """Die after a file is in place, and between the last file and the transaction."""
    put(recorder, "a", NOW - 3 * HOUR)
    put(recorder, "b", NOW - 60)
    before = everything(recorder.reader())
    rename = segments.Path.rename

    def dies(path, target):
        result = rename(path, target)
        if target.parts[-3] == at:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as broken:
        if at == "delete":
            broken.setattr(segments, "enter", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        else:
            broken.setattr(segments.Path, "rename", dies)
        with pytest.raises(KeyboardInterrupt):
            upkeep(recorder).run_once()
    recorder.close()

    again = Recorder(recorder.data_dir)
    after = everything(again.reader())
    copies = {
        row: [r["request_id"] for r, _ in again.reader().every_choice(["seq"])].count(row) for row in after
    }
    again.close()

    assert after == before
    assert copies == {"a": 1, "b": 1}
    assert not list(tmp_path.glob("segments/*/*/*.tmp"))


def test_a_damaged_segment_is_set_aside_and_the_rest_reads(recorder):
    put(recorder, "a", NOW - 30 * HOUR)
    put(recorder, "b", NOW - 3 * HOUR)
    made, _ = upkeep(recorder).run_once()
    recorder.close()
    (recorder.data_dir / "tape.duckdb").unlink()
    made[0].path(recorder.data_dir, "steps").write_bytes(b"PAR1 damaged PAR1")

    again = Recorder(recorder.data_dir)
    ids = [row["request_id"] for row in again.reader().traces()[0]]
    again.close()

    assert ids == ["b"]
    assert len(list((recorder.data_dir / "quarantine").iterdir())) == 3


@pytest.mark.parametrize("gone", [False, True])
def test_recover_sets_a_damaged_listed_segment_aside(recorder, gone):
    put(recorder, "a", NOW - 30 * HOUR)
    put(recorder, "b", NOW - 3 * HOUR)
    made, _ = upkeep(recorder).run_once()
    file = made[0].path(recorder.data_dir, "steps")
    content = file.read_bytes()
    file.unlink() if gone else file.write_bytes(content[:200] + b"\x00" * 200 + content[400:])

    assert recorder.recover() == [made[0]]
    assert [row["request_id"] for row in recorder.reader().traces()[0]] == ["b"]
    assert recorder.recover() == []


def test_retention_drops_by_age(recorder):
    for days in (10, 5, 1):
        put(recorder, f"{days} days", NOW - days * 24 * HOUR)

    _, dropped = upkeep(recorder, max_age_s=6 * 24 * HOUR).run_once()

    assert [s.num_requests for s in dropped] == [1]
    assert [row["request_id"] for row in recorder.reader().traces()[0]] == ["1 days", "5 days"]
    assert not any(dropped[0].path(recorder.data_dir, table).exists() for table in segments.MOVED_TABLES)
    assert not recorder.reader().has("10 days")


def test_retention_drops_the_oldest_beyond_a_size(recorder):
    for days in (3, 2, 1):
        put(recorder, f"{days} days", NOW - days * 24 * HOUR)
    made, _ = upkeep(recorder).run_once()
    most = sum(s.bytes for s in made) - 1

    _, dropped = upkeep(recorder, max_bytes=most).run_once()

    assert [s.dt for s in dropped] == [made[0].dt]


def test_columns_that_a_segment_is_too_old_for_are_null(recorder, monkeypatch):
    put(recorder, "a", NOW - 3 * HOUR)
    made, _ = upkeep(recorder).run_once()
    column = segments.TABLES["steps"][-1]
    monkeypatch.setitem(
        segments.TABLES,
        "steps",
        (*segments.TABLES["steps"][:-1], replace(column, since=segments.VERSION + 1)),
    )

    source = segments.spanning("steps", ["seq", column.name], made, recorder.data_dir, live_version=None)
    rows = recorder.cursor().execute(f"SELECT count({column.name}), count(*) FROM {source}").fetchone()

    assert (rows[0], rows[1] > 10) == (0, True)


def test_a_read_only_directory_reads(recorder, tmp_path):
    put(recorder, "a", NOW - 3 * HOUR)
    upkeep(recorder).run_once()
    put(recorder, "b", NOW)
    before = everything(recorder.reader())
    recorder.close()
    copy = tmp_path / "copy"
    shutil.copytree(recorder.data_dir, copy, ignore=shutil.ignore_patterns("copy"))
    for folder, _, files in os.walk(copy):
        for file in files:
            os.chmod(os.path.join(folder, file), 0o444)
        os.chmod(folder, 0o555)

    assert everything(Reader.open(copy)) == before

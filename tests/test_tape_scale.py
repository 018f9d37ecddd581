"""The reader on a long tape: never much slower than the bare query over the same rows."""

import time
from statistics import median

import pyarrow as pa
import pytest
from tape_fakes import Script

from gateway.policy import Policy
from logs.reader import Reader, TraceFilter
from logs.recorder import Recorder
from logs.rows import Capture, Life, request_row, request_table, step_table
from logs.schema import names

pytestmark = pytest.mark.soak

STEPS = 10_000_000
MOST = 1.5
REPEATS = 15


def generate(data_dir, steps):
    """A tape of that many steps, about half of it in segments: eight scripted traces, over and over."""
    scripts = [Script(Policy(loop_limit=0), seed=i, num_tokens=110).run() for i in range(8)]
    rows = pa.concat_tables(
        [step_table(s.rows, [i] * len(s.rows), Capture.FULL) for i, s in enumerate(scripts)]
    )
    requests = request_table(
        [
            request_row(Life(i, s.trace()), Capture.FULL, lambda _: "some text " * 20)
            for i, s in enumerate(scripts)
        ]
    )
    recorder = Recorder(data_dir)
    query = recorder.cursor()
    query.register("rows", rows)
    query.register("requests_of", requests)
    copies, chunk = steps // rows.num_rows, 200
    for low in range(0, copies, chunk):
        high = min(copies, low + chunk)
        if low and low // chunk == copies // chunk // 2:
            recorder.compact()
        renamed = "k * 8 + trace_no + 1 AS trace_no, 'r' || md5((k * 8 + trace_no)::VARCHAR) AS request_id"
        source = f"(SELECT range AS k FROM range({low}, {high}))"
        query.execute(
            f"INSERT INTO steps BY NAME SELECT * EXCLUDE (k) REPLACE ({renamed}) FROM rows, {source}"
        )
        query.execute(
            "INSERT INTO requests BY NAME SELECT * EXCLUDE (k) REPLACE"
            f" ({renamed}, IF(k % 20 = 0, 'canary', 'stable') AS arm, (k % 7)::INTEGER AS guard_hits)"
            f" FROM requests_of, {source}"
        )
    recorder.close()


@pytest.mark.timeout(1800)
def test_opening_a_trace_and_listing_keep_up_with_the_bare_query(tmp_path, capsys):
    generate(tmp_path, STEPS)
    reader = Reader.open(tmp_path)
    closed = sum(segment.num_steps for segment in reader.segments())
    assert 0.3 < closed / STEPS < 0.7
    ids = {
        name: reader.query(f"SELECT request_id FROM {table} USING SAMPLE {REPEATS}")["request_id"].to_pylist()
        for name, table in (("live", "requests"), ("closed", "moved"))
    }
    steps, requests = reader.sql("steps", names("steps")), reader.sql("requests", names("requests"))
    light = "* EXCLUDE (prompt_ids, prompt_text, answer_text, params)"
    by_id = f"SELECT * FROM {steps} WHERE request_id = ? ORDER BY seq"
    page = f"SELECT {light} FROM {requests} WHERE {{}} ORDER BY trace_no DESC LIMIT 50"
    chosen = TraceFilter(arm="canary", min_guard_hits=3)
    cases = {
        "open a live trace": (reader.steps, by_id, ids["live"]),
        "open a closed trace": (reader.steps, by_id, ids["closed"]),
        "newest page": (lambda _: reader.traces(), page.format("true"), [None] * REPEATS),
        "filtered page": (
            lambda _: reader.traces(filters=chosen),
            page.format("arm = 'canary' AND guard_hits >= 3"),
            [None] * REPEATS,
        ),
    }
    ratios = {}
    for name, (ours, bare, arguments) in cases.items():
        took, took_bare = [], []
        for argument in arguments:
            began = time.perf_counter()
            reader.query(bare, [] if argument is None else [argument])
            between = time.perf_counter()
            ours(argument)
            took.append(time.perf_counter() - between)
            took_bare.append(between - began)
        ratios[name] = median(took) / median(took_bare)
        with capsys.disabled():
            # The times themselves are what this run is for.
            print(f"\n{name}: {median(took) * 1e3:.0f} ms, bare {median(took_bare) * 1e3:.0f} ms")  # noqa: T201

    assert {name: ratio for name, ratio in ratios.items() if ratio > MOST} == {}

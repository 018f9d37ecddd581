"""The tape under faults, at length: killed at random moments, and on a disk that fills up."""

import os
import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from gateway.recorded import COLUMNS
from gateway.replay import replay_all
from logs.recorder import Recorder

pytestmark = pytest.mark.soak

BUSY = """
    import sys, time
    from pathlib import Path
    from dataclasses import replace
    from msgspec import structs
    from gateway.core import Tick
    from gateway.policy import Policy
    from logs.recorder import Recorder
    from tape_fakes import Script

    recorder = Recorder(Path(sys.argv[1]))
    scripts = [Script(Policy(), seed=i, num_tokens=40).run() for i in range(20)]
    print("busy", flush=True)
    count = 0
    while True:
        script = scripts[count % 20]
        id = f"{sys.argv[2]}-{count}"
        trace = replace(script.trace(), request=replace(script.trace().request, id=id))
        recorder.on_admit(replace(trace, finished=None))
        for row in script.rows:
            recorder.on_tick(Tick(0, None, [], [structs.replace(row, request_id=id, ts=time.time())]))
            time.sleep(0.0005)
        recorder.on_finish(trace)
        count += 1
"""


def run(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )  # fmt: skip


@pytest.mark.timeout(900)
def test_kill_9_at_fifty_random_moments(tmp_path):
    moments = random.Random(0)
    for i in range(50):
        process = run(BUSY, str(tmp_path), str(i))
        assert process.stdout is not None
        with process.stdout:
            while "busy" not in process.stdout.readline():
                assert process.poll() is None
            started = time.time()
            time.sleep(moments.uniform(0.05, 1.5))
            process.kill()
            killed = time.time()
            process.wait()
        recorder = Recorder(tmp_path)
        newest = recorder.cursor().execute("SELECT coalesce(max(ts), 0) FROM steps").fetchone()[0]
        results = list(replay_all(recorder.reader().every_choice(COLUMNS)))
        recorder.close()

        assert recorder.quarantined == ()
        # What it lost is no older than a second; it has lost nothing from before it began.
        assert killed - max(newest, started) < 1.0
        assert [m for result in results for m in result.mismatches] == []


FULL = """
    import resource, signal, sys
    from pathlib import Path
    from gateway.policy import Policy
    from logs.recorder import Recorder
    from tape_fakes import Script, record

    def put(id, seed=0):
        record(recorder, Script(Policy(), seed=seed, num_tokens=200, request_id=id).run())
        recorder.flush()

    # A file that cannot grow stands in for a disk that is full.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    recorder = Recorder(Path(sys.argv[1]))
    put("before")
    size = max(file.stat().st_size for file in Path(sys.argv[1]).glob("tape.duckdb*"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 200_000, resource.RLIM_INFINITY))
    for i in range(20):
        put(f"full{i}", i)
    assert set(recorder.dropped) == {"write_error"} and recorder.queue_depth == 0
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    put("after")
    recorder.close()
    print("done")
"""


def test_a_full_disk_costs_rows_loudly_and_nothing_else(tmp_path):
    output, _ = run(FULL, str(tmp_path)).communicate()
    recorder = Recorder(tmp_path)
    reader = recorder.reader()
    found = [reader.has(id) for id in ("before", "full0", "full19", "after")]
    results = list(replay_all(reader.every_choice(COLUMNS)))
    recorder.close()

    assert output.strip().endswith("done")
    assert "tape_write_failed" in output
    assert "tape_dropping" in output
    assert (found, recorder.quarantined) == ([True, True, False, True], ())
    assert [m for result in results for m in result.mismatches] == []

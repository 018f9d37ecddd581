"""`tokentape tape` on a closed file, and the same through the gateway that holds it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest
import structlog.testing
from serving import FakeGateway, fake_gateway
from tape_fakes import Script, record

from gateway.api import tape
from gateway.cli import main
from gateway.core import AuditStatus, Settled, Tick
from gateway.policy import Policy
from gateway.remote import running_gateway
from logs.reader import Reader
from logs.recorder import Recorder

IDS = ("r0", "r1")


def fill(data_dir: Path) -> None:
    """Two complete traces that ended long ago."""
    recorder = Recorder(data_dir)
    for seed, id in enumerate(IDS):
        record(recorder, Script(Policy(), seed, request_id=id).run())
        recorder.on_tick(Tick(99, None, settled=[Settled(id, 0, AuditStatus.NOT_CHOSEN)]))
    recorder.close()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The gateway's log lines, in this process, would be on the command's standard output."""
    before = structlog.get_config()
    with structlog.testing.capture_logs():
        yield
    structlog.configure(**before)


@pytest.fixture(params=["file", "gateway"])
def data_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A filled tape, closed or held by a gateway."""
    fill(tmp_path)
    if request.param == "file":
        yield tmp_path
        return
    with fake_gateway(data_dir=tmp_path) as gateway:
        (tmp_path / "gateway.url").write_text(gateway.url)
        assert running_gateway(tmp_path) == gateway.url
        yield tmp_path


def tokentape(verb: str, data_dir: Path, *more: object) -> int:
    return main(["tape", verb, "--data-dir", str(data_dir), *map(str, more)])


def test_stats_are_those_of_the_tape(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tokentape("stats", data_dir) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["segments"]) == (2, 0)
    assert found["finish_reasons"] == {"length": 2}


def test_an_export_has_every_trace_and_step(data_dir: Path, tmp_path: Path) -> None:
    lines, table = tmp_path / "all.jsonl", tmp_path / "all.parquet"
    assert tokentape("export", data_dir, "--out", lines) == 0
    assert tokentape("export", data_dir, "--out", table) == 0
    written = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [line["request"]["request_id"] for line in written if "request" in line] == list(IDS)
    steps = Counter(line["step"]["request_id"] for line in written if "step" in line)
    # A row for each emitted row of the two scripts.
    assert steps == {id: len(Script(Policy(), seed, request_id=id).run().rows) for seed, id in enumerate(IDS)}
    assert Counter(pq.read_table(table)["request_id"].to_pylist()) == steps


def test_an_export_may_be_a_part_and_go_to_standard_output(
    data_dir: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert tokentape("export", data_dir, "--q", "nowhere in it") == 0
    assert capfdbinary.readouterr().out == b""
    assert tokentape("export", data_dir, "--arm", "stable", "--format", "parquet") == 0
    assert set(pq.read_table(io.BytesIO(capfdbinary.readouterr().out))["request_id"].to_pylist()) == set(IDS)


def test_an_export_never_overwrites(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("mine")
    assert tokentape("export", data_dir, "--out", tmp_path / "mine") == 2
    assert "--out" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "mine"


def test_compact_moves_finished_traces_and_recover_sets_damage_aside(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tokentape("compact", data_dir) == 0
    (made,) = (data_dir / "segments" / "steps").glob("*/*.parquet")
    name = f"{made.parent.name.removeprefix('dt=')}/{made.name}"
    assert capsys.readouterr().out == f"made {name}\n1 segments made, 0 dropped\n"
    assert tokentape("recover", data_dir) == 0
    assert capsys.readouterr().out == "0 damaged, 0 taken in again\n"

    made.write_bytes(made.read_bytes()[:100])
    assert tokentape("recover", data_dir) == 0
    assert capsys.readouterr().out == f"set aside in quarantine: {name}\n1 damaged, 0 taken in again\n"
    assert tokentape("stats", data_dir) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 0


def test_recover_takes_segments_in_again_when_the_live_file_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path)
    assert tokentape("compact", tmp_path) == 0
    (tmp_path / "tape.duckdb").unlink()
    capsys.readouterr()
    assert tokentape("recover", tmp_path) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 damaged, 1 taken in again"
    reader = Reader.open(tmp_path)
    assert {row["request_id"] for row in reader.traces()[0]} == set(IDS)
    reader.close()


@pytest.mark.parametrize("verb", ["stats", "compact", "recover", "export"])
def test_no_tape_is_2_and_makes_none(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tokentape(verb, tmp_path / "none") == 2
    assert "--data-dir" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    assert tokentape(verb, tmp_path / "none", "--url", "http://127.0.0.1:9") == 2
    assert "--url" in capsys.readouterr().err


def test_only_the_answer_is_on_standard_output(tmp_path: Path) -> None:
    fill(tmp_path)
    command = [sys.executable, "-m", "gateway.cli", "tape", "compact", "--data-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["made", "1"]
    assert "tape_segment" in done.stderr


def test_a_reader_that_has_enough_is_no_error(tmp_path: Path) -> None:
    fill(tmp_path)
    command = [sys.executable, "-m", "gateway.cli", "tape", "export", "--data-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_an_address_left_behind_is_not_believed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path / "mine")
    with fake_gateway(data_dir=tmp_path / "other") as other:
        # Where the killed gateway of this tape listened, another one serves another tape now.
        (tmp_path / "mine" / "gateway.url").write_text(other.url)
        assert tokentape("stats", tmp_path / "mine") == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 2


def test_a_tape_that_another_process_holds_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(tmp_path)
    # No gateway says where it listens, so the file itself is tried, and found locked.
    assert tokentape("compact", tmp_path) == 2
    assert "in use by another process" in capsys.readouterr().err
    recorder.close()


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[FakeGateway]:
    fill(tmp_path)
    with fake_gateway(data_dir=tmp_path) as gateway:
        yield gateway


def test_the_export_names_its_file_and_refuses_what_it_does_not_know(gateway: FakeGateway) -> None:
    got = gateway.http.get("/v1/tape/export", params={"format": "parquet"})
    assert got.headers["content-disposition"] == 'attachment; filename="tape.parquet"'
    assert got.headers["content-type"] == "application/vnd.apache.parquet"
    assert "content-length" not in got.headers
    for params, param in (({"format": "csv"}, "format"), ({"polcy": "x"}, "polcy")):
        refused = gateway.http.get("/v1/tape/export", params=params)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_a_client_that_leaves_ends_its_export(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def endless(choices: Any, file: Any, format: str) -> None:
        try:
            while True:
                file.write(b"x" * 1_000_000)
        finally:
            ended.set()

    monkeypatch.setattr(tape, "write", endless)
    with httpx.stream("GET", f"{gateway.url}/v1/tape/export", trust_env=False) as answer:
        next(answer.iter_raw())
        assert gateway.service.num_exports == 1
    assert ended.wait(10)
    deadline = time.monotonic() + 10
    while gateway.service.num_exports:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_more_exports_than_there_may_be_are_told_to_come_again(gateway: FakeGateway) -> None:
    gateway.service.num_exports = tape.MOST_EXPORTS
    got = gateway.http.get("/v1/tape/export")
    assert (got.status_code, got.headers["retry-after"]) == (503, "30")


def test_an_export_that_fails_half_way_has_no_end(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(choices: Any, file: Any, format: str) -> None:
        file.write(b"x" * 100)
        file.flush()
        raise OSError("the disk is gone")

    monkeypatch.setattr(tape, "write", broken)
    out = tmp_path / "part"
    assert tokentape("export", tmp_path, "--url", gateway.url, "--out", out) == 2
    assert "--url" in capsys.readouterr().err
    assert not out.exists()

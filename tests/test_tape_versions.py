"""Tapes of every schema version so far open, read and replay."""

import gzip
import shutil
from pathlib import Path

import pytest

from gateway.recorded import COLUMNS
from gateway.replay import replay_all
from logs.reader import Reader
from logs.recorder import Recorder
from logs.schema import VERSION

DATA = Path(__file__).parent / "data"


def test_there_is_a_fixture_tape_of_this_version():
    assert (DATA / f"tape-v{VERSION}").is_dir()


def ids(version):
    return ["cut", *(["cascade"] if version >= 5 else []), "guarded", "large", "trust", "exact"]


@pytest.fixture(params=range(1, VERSION + 1))
def data_dir(request, tmp_path):
    fixture = DATA / f"tape-v{request.param}"
    shutil.copytree(fixture / "segments", tmp_path / "segments")
    (tmp_path / "tape.duckdb").write_bytes(gzip.decompress((fixture / "tape.duckdb.gz").read_bytes()))
    return tmp_path


def told(reader):
    ids = [row["request_id"] for row in reader.traces()[0]]
    assert [reader.trace(one)["request_id"] for one in ids] == ids
    results = list(replay_all(reader.every_choice(COLUMNS)))
    mismatches = [str(mismatch) for result in results for mismatch in result.mismatches]
    return ids, sum(result.decisions for result in results) > 90, mismatches


def test_it_reads_and_replays_without_being_written(data_dir, request):
    version = request.node.callspec.params["data_dir"]
    assert told(Reader.open(data_dir)) == (ids(version), True, [])


def test_it_opens_for_writing_and_still_does(data_dir, request):
    version = request.node.callspec.params["data_dir"]
    recorder = Recorder(data_dir)
    found = told(recorder.reader())
    cut = recorder.reader().trace("cut")
    recorder.close()

    assert found == (ids(version), True, [])
    assert (cut["finish_reason"], cut["interrupted"]) == (None, True)

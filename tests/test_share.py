"""A fleet's shared storage: every gateway reads what the others closed, whoever dies at whatever moment."""

import json
import shutil
import time
from pathlib import Path

import fsspec
import pytest
from tape_fakes import Script, record

from gateway.policy import Policy
from gateway.replay_report import replay_tape
from logs import share as shares
from logs.numbers import EPOCH, FIRST, LANE_BITS, Numbers, lane_of
from logs.reader import Reader, TraceFilter
from logs.recorder import Recorder
from logs.segments import own
from logs.share import Share, ShareError, ShareTaken
from logs.upkeep import Keep

KEEP = Keep(close_s=1.0)


class Fleet:
    """Recorders over one share."""

    def __init__(self, folder, url=None):
        self.folder = folder
        self.url = url or str(folder / "share")
        self.recorders = {}
        self.count = 0

    def __getitem__(self, name):
        if name not in self.recorders:
            self.recorders[name] = Recorder(self.folder / name, keep=KEEP, gateway=name, share=self.url)
        return self.recorders[name]

    def put(self, name, *ids):
        for id in ids:
            self.count += 1
            script = Script(Policy(protect_first=2), self.count, num_tokens=20, request_id=id).run()
            record(self[name], script)
        self[name].flush()

    def close_segments(self, *names):
        """Finished traces move and are sent; then the others look."""
        for name in names:
            self[name]._upkeep.run_once(everything=True, settle_s=0.0)

    def kill(self, name):
        """What is left on disk of a process that ends here and now."""
        recorder = self.recorders.pop(name)
        recorder.flush()
        copy = self.folder / f"{name}.copy"
        shutil.copytree(recorder.data_dir, copy)
        recorder.share = None
        recorder.close()
        shutil.rmtree(recorder.data_dir)
        copy.rename(recorder.data_dir)


@pytest.fixture
def fleet(tmp_path):
    built = Fleet(tmp_path)
    yield built
    for recorder in built.recorders.values():
        recorder.close()


def ids(reader, **filters):
    page, _ = reader.traces(limit=100, filters=TraceFilter(**filters))
    return [row["request_id"] for row in page]


def test_all_gateways_read_one_tape(fleet):
    fleet.put("a", "a1", "a2")
    fleet.put("b", "b1")
    fleet.put("a", "a3")
    fleet.close_segments("a", "b", "a")

    for name in "ab":
        reader = fleet[name].reader()
        assert sorted(ids(reader)) == ["a1", "a2", "a3", "b1"]
        assert ids(reader, gateway="b") == ["b1"]
        assert {row["request_id"]: row["gateway"] for row in reader.traces()[0]} == {
            "a1": "a", "a2": "a", "a3": "a", "b1": "b"
        }  # fmt: skip
        assert reader.has("b1")
        assert reader.steps("a2").equals(fleet["a"].reader().steps("a2"))
        assert reader.steps("a2").num_rows >= 20
        report = replay_tape(reader)
        assert (report.mismatches, report.decisions > 40) == (0, True)


def test_one_order_over_all_tapes_page_by_page(fleet):
    for i in range(6):
        fleet.put("ab"[i % 2], f"r{i}")
    fleet.close_segments("a", "b", "a")
    reader, seen, cursor = fleet["a"].reader(), [], None
    while True:
        page, cursor = reader.traces(limit=2, cursor=cursor)
        seen += [row["request_id"] for row in page]
        if cursor is None:
            break
    assert seen == [f"r{i}" for i in reversed(range(6))]


def test_the_share_alone_is_a_tape_to_read(fleet):
    fleet.put("a", "a1")
    fleet.put("b", "b1")
    fleet.close_segments("a", "b")
    reader = Reader.open(Path(fleet.url))
    assert sorted(ids(reader)) == ["a1", "b1"]
    assert replay_tape(reader).mismatches == 0


def test_what_is_sent_and_taken_twice_is_there_once(fleet):
    fleet.put("a", "a1")
    fleet.close_segments("a", "b", "a", "b")
    done = fleet["b"].share.sync(fleet["b"].cursor())
    assert (done.sent, done.taken, done.dropped) == (0, 0, 0)
    assert fleet["b"].share.last_sync > time.time() - 60
    assert ids(fleet["b"].reader()) == ["a1"]


@pytest.mark.parametrize("calls", range(4))
def test_a_send_cut_short_is_made_again_after_a_kill(fleet, monkeypatch, calls):
    fleet.put("a", "a1")
    put, made = Share._put, []

    def dying(self, file, remote):
        made.append(remote)
        if len(made) > calls:
            raise OSError("killed")
        put(self, file, remote)

    monkeypatch.setattr(Share, "_put", dying)
    fleet.close_segments("a")
    fleet.close_segments("b")
    assert ids(fleet["b"].reader()) == ([] if calls < 3 else ["a1"])
    fleet.kill("a")
    monkeypatch.undo()
    fleet.close_segments("a", "b")
    assert ids(fleet["b"].reader()) == ids(fleet["a"].reader()) == ["a1"]


def test_what_was_open_when_it_was_killed_comes_after_the_restart(fleet):
    fleet.put("a", "a1")
    fleet.kill("a")
    fleet.close_segments("b")
    assert ids(fleet["b"].reader()) == []
    fleet.close_segments("a", "b")
    assert ids(fleet["b"].reader()) == ["a1"]


def test_a_take_cut_short_is_made_again(fleet, monkeypatch):
    fleet.put("a", "a1")
    fleet.close_segments("a")
    with monkeypatch.context() as patch:
        patch.setattr(shares, "enter", lambda *_: (_ for _ in ()).throw(OSError("killed")))
        fleet.close_segments("b")
    assert ids(fleet["b"].reader()) == []
    fleet.close_segments("b")
    assert ids(fleet["b"].reader()) == ["a1"]


def test_a_drained_gateway_leaves_nothing_behind(fleet):
    fleet.put("a", "a1")
    fleet.recorders.pop("a").close()
    fleet.close_segments("b")
    assert ids(fleet["b"].reader()) == ["a1"]


def test_what_one_drops_the_others_drop(fleet):
    fleet.put("a", "a1")
    fleet.close_segments("a", "b")
    recorder = fleet["a"]
    recorder._upkeep._keep = Keep(close_s=1.0, max_bytes=0)
    fleet.close_segments("a", "b")
    assert ids(fleet["b"].reader()) == []
    assert list((fleet.folder / "b" / "fleet").rglob("*.parquet")) == []


def test_an_unmounted_share_is_no_empty_share(fleet):
    fleet.put("a", "a1")
    fleet.close_segments("a", "b")
    moved = Path(fleet.url).rename(fleet.folder / "elsewhere")
    Path(fleet.url).mkdir()
    fleet.close_segments("b")
    assert ids(fleet["b"].reader()) == ["a1"]
    shutil.rmtree(fleet.url)
    moved.rename(fleet.url)


def test_one_name_is_one_data_directory(fleet):
    fleet.put("a", "a1")
    with pytest.raises(ShareTaken, match="'a' is taken"):
        Recorder(fleet.folder / "other", gateway="a", share=fleet.url)
    # The data directory was let go of.
    Recorder(fleet.folder / "other").close()


def test_a_data_directory_keeps_its_name(fleet):
    fleet.put("a", "a1")
    fleet.recorders.pop("a").close()
    with pytest.raises(ShareTaken, match="is 'a' in the fleet"):
        Recorder(fleet.folder / "a", gateway="renamed", share=fleet.url)


def test_an_unknown_storage_is_named(tmp_path):
    with pytest.raises(ShareError, match="nosuch"):
        Recorder(tmp_path, gateway="a", share="nosuch://x")


HOSTILE = {
    "bytes that are no Parquet": lambda good: b"PAR1 no",
    "half a file": lambda good: good[: len(good) // 2],
    "nothing": lambda good: b"",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_no_segment_is_left_out_and_the_rest_reads(fleet, what):
    fleet.put("a", "a1")
    fleet.close_segments("a")
    fleet.put("c", "c1")
    fleet.close_segments("c")
    for file in Path(fleet.url, "fleet", "a").rglob("*.parquet"):
        file.write_bytes(HOSTILE[what](file.read_bytes()))
    fleet.close_segments("b")
    assert ids(fleet["b"].reader()) == ["c1"]
    assert not [f for f in (fleet.folder / "b" / "fleet" / "a").rglob("*") if f.is_file()]


def test_other_columns_and_later_versions_are_left_out(fleet):
    fleet.put("a", "a1")
    fleet.close_segments("a")
    steps = next(Path(fleet.url, "fleet", "a").glob("segments/steps/*/*.parquet"))
    requests = Path(str(steps).replace("/steps/", "/requests/"))
    # A later version's name on good files, and files whose columns are other ones.
    for table in ("steps", "passes", "requests"):
        file = Path(str(steps).replace("/steps/", f"/{table}/"))
        file.with_name(file.name.replace("v3-", "v99-")).write_bytes(file.read_bytes())
    steps.write_bytes(requests.read_bytes())
    fleet.close_segments("b")
    assert fleet["b"].reader().segments() == []


@pytest.mark.parametrize(
    "path",
    [
        "fleet/../x/segments/requests/dt=2026-01-01/v3-1-2.parquet",
        "fleet/.hidden/segments/requests/dt=2026-01-01/v3-1-2.parquet",
        "fleet/a'b/segments/requests/dt=2026-01-01/v3-1-2.parquet",
        "fleet/evil/segments/requests/dt=2026-01-01/x' OR 1.parquet",
        "fleet/evil/segments/other/dt=2026-01-01/v3-1-2.parquet",
        "fleet/evil/segments/requests/dt=today/v3-1-2.parquet",
    ],
)
def test_names_that_are_none_are_not_looked_at(fleet, path):
    assert fleet["b"]
    for table in ("steps", "passes", "requests"):
        file = Path(fleet.url, path.replace("/requests/", f"/{table}/"))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x")
    done = fleet["b"].share.sync(fleet["b"].cursor())
    assert (done.taken, fleet["b"].share._unreadable) == (0, set())


def test_traces_numbered_before_the_fleet_stay_at_home(tmp_path):
    fleet = Fleet(tmp_path)
    alone = Recorder(tmp_path / "a")
    record(alone, Script(Policy(), 1, num_tokens=8, request_id="old").run())
    alone.flush()
    alone.compact()
    alone.close()
    fleet.put("a", "new")
    fleet.close_segments("a", "b")
    assert ids(fleet["a"].reader()) == ["new", "old"]
    assert ids(fleet["b"].reader()) == ["new"]
    for recorder in fleet.recorders.values():
        recorder.close()


def test_a_url_works_like_a_path(tmp_path):
    fsspec.filesystem("memory").rm("/", recursive=True) if fsspec.filesystem("memory").ls("/") else None
    fleet = Fleet(tmp_path, "memory://bucket/tape")
    fleet.put("a", "a1")
    fleet.close_segments("a", "b")
    assert ids(fleet["b"].reader()) == ["a1"]
    marker = json.loads(fsspec.filesystem("memory").cat_file("/bucket/tape/fleet/a/gateway.json"))
    assert (tmp_path / "a" / "fleet.id").read_text() == f"{marker['id']} a"
    assert len(own(fleet["a"].cursor())) == 1
    for recorder in fleet.recorders.values():
        recorder.close()


def test_numbers_rise_whatever_the_clock_does():
    times = iter([EPOCH + 10.0, EPOCH + 10.0, EPOCH + 5.0, EPOCH + 20.0, -1.0])
    numbers = Numbers(0, "a", lambda: next(times))
    given = [numbers.next() for _ in range(5)]
    assert given == sorted(set(given))
    assert [n >> LANE_BITS for n in given[:2]] == [FIRST >> LANE_BITS, (FIRST >> LANE_BITS) + 1]
    assert {n % (1 << LANE_BITS) for n in given} == {lane_of("a")}
    later = Numbers(given[-1], "a", lambda: EPOCH + 10_000_000.5)
    assert later.next() >> LANE_BITS == 10_000_000_500
    assert [Numbers(4).next(), Numbers(0).next()] == [5, 1]

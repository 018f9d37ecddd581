"""A control's evidence from others' segments equals what it would have seen had it served itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tape_fakes import SERVED, Script

from alerts.config import AlertsConfig
from alerts.follow import Control
from alerts.service import AlertsService
from gateway.core import AuditStatus, Settled, Tick
from gateway.policy import Policy
from gateway.request import Trace
from logs.recorder import Recorder
from logs.rows import Capture
from logs.upkeep import Keep

NOW = 1_800_000_000.0
ROLLOUT = {
    "name": "looser", "canary": {"threshold": 0.1}, "weight": 0.5, "steps": [0.5], "min_units": 1000,
    "min_step_s": 0.0,
}  # fmt: skip


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


class Gateway:
    """A tape and the service over it, without an engine."""

    def __init__(self, folder: Path, name: str, share: str, capture: Capture = Capture.FULL) -> None:
        self.folder, self.name, self.clock = folder / name, name, Clock()
        self.share, self.capture = share, capture
        self.open()

    def open(self) -> None:
        self.recorder = Recorder(
            self.folder, keep=Keep(close_s=1.0), gateway=self.name, share=self.share, capture=self.capture
        )
        self.service = AlertsService(
            config=msgspec.convert({"interval_s": 1000.0}, AlertsConfig),
            data_dir=self.folder,
            cursor=self.recorder.cursor,
            policies={"stable": Policy()},
            environ={},
            base_url="http://x",
            samples=dict,
            queue_limit=100,
            name=self.name,
            control=None if self.name == "control" else Control("http://control:1"),
            clock=self.clock,
        )

    def serve(self, ids: range, users: int, follows: AlertsService, ends: bool = True, **fields: Any) -> None:
        """Answer requests with the arms that `follows` gives, told to tape and service."""
        for i in ids:
            self.clock.now += 1.0
            got = follows.assign(f"r{i}", f"u{i % users}" if users else None, None)
            script = Script(got.policy, i, num_tokens=12, request_id=f"r{i}").run()
            trace = script.trace()
            given = replace(
                trace.request, arm=got.arm, policy=got.policy, policy_name=got.policy_name,
                received=self.clock.now, user_hash=got.user_hash, params={"user": "x"},
            )  # fmt: skip
            given = replace(given, **fields)
            assert trace.finished is not None
            now = self.clock.now
            times = replace(
                trace.finished.timings, received=now, admitted=now, first_token=now + 0.5, finished=now + 1
            )
            done = Trace(given, SERVED, replace(trace.finished, timings=times), trace.audit)
            for observer in (self.recorder, self.service.observer):
                observer.on_admit(Trace(given, SERVED))
                observer.on_tick(Tick(0, None, [], script.rows))
                if ends:
                    observer.on_finish(done)
                    observer.on_tick(Tick(1, None, settled=[Settled(f"r{i}", 0, AuditStatus.NOT_CHOSEN)]))
        self.recorder.flush()

    def close_segments(self) -> None:
        self.recorder.flush()
        self.recorder._upkeep.run_once(everything=True, settle_s=0.0)

    def fold(self) -> dict[str, Any]:
        """What the service knows now of the rollout."""
        queue = self.service.monitor.intake.queue
        while not queue.empty():
            event = queue.get()
            assert event is not None
            event()
        self.service.monitor.judge()
        return self.service.rollout("looser")

    def close(self) -> None:
        self.recorder.share = None
        self.recorder.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Gateway, Gateway]]:
    share = str(tmp_path / "share")
    control, other = Gateway(tmp_path, "control", share), Gateway(tmp_path, "other", share)
    control.service.monitor.judge()
    yield control, other
    for gateway in (control, other):
        gateway.close()


def told(rollout: dict[str, Any]) -> dict[str, Any]:
    """Numbers that must be equal wherever the answers came from."""
    return {
        name: (round(e["against"], 9), round(e["for"], 9), e["units"], e["missing"], e["mean"])
        for name, e in rollout["evidence"].items()
    }


@pytest.mark.parametrize("users", [0, 15])
@pytest.mark.parametrize("capture", [Capture.FULL, Capture.SIGNALS])
def test_the_same_as_if_it_had_answered_itself(tmp_path: Path, users: int, capture: Capture) -> None:
    share = str(tmp_path / "share")
    alone = Gateway(tmp_path, "control", share, capture)
    alone.service.start_rollout(ROLLOUT)
    alone.service.monitor.canaries.current.plan = plan = replace(  # type: ignore[union-attr]
        alone.service.monitor.canaries.current.plan,
        salt="s",  # type: ignore[union-attr]
    )
    alone.service.monitor.canaries._refresh()
    alone.serve(range(80), users, alone.service)
    direct = told(alone.fold())
    alone.close()

    base = tmp_path / "fleet"
    control, other = (
        Gateway(base, "control", str(base / "s")),
        Gateway(base, "other", str(base / "s"), capture),
    )
    control.service.monitor.judge()
    control.service.start_rollout(ROLLOUT)
    control.service.monitor.canaries.current.plan = plan  # type: ignore[union-attr]
    control.service.monitor.canaries._refresh()
    other.serve(range(80), users, control.service)
    other.close_segments()
    control.close_segments()
    control.clock.now = other.clock.now
    found = told(control.fold())
    for gateway in (control, other):
        gateway.close()
    assert direct["agreement"][2]["canary"] > 5
    assert found == direct


def test_folded_once_across_a_crash(pair: tuple[Gateway, Gateway]) -> None:
    control, other = pair
    control.service.start_rollout(ROLLOUT)
    other.serve(range(40), 0, control.service)
    other.close_segments()
    control.close_segments()
    control.clock.now = other.clock.now
    before = told(control.fold())
    assert before["agreement"][2]["canary"] > 5
    assert told(control.fold()) == before
    with control.service.monitor.lock:
        control.service.monitor.save()
    other.serve(range(40, 60), 0, control.service)
    other.close_segments()
    control.close_segments()
    after = told(control.fold())
    assert after != before
    # It dies before that is saved: the segment is folded onto the state from before it.
    control.close()
    control.open()
    assert told(control.fold()) == after
    assert told(control.fold()) == after


def test_what_died_with_its_gateway_is_missing(pair: tuple[Gateway, Gateway]) -> None:
    control, other = pair
    control.service.start_rollout(ROLLOUT)
    other.serve(range(10), 0, control.service, ends=False)
    other.close()
    other.open()
    other.close_segments()
    control.close_segments()
    control.clock.now = other.clock.now
    evidence = control.fold()["evidence"]["agreement"]
    assert sum(evidence["missing"].values()) == sum(evidence["units"].values()) == 10


def test_other_policies_own_routing_and_the_past_are_no_evidence(pair: tuple[Gateway, Gateway]) -> None:
    control, other = pair
    other.serve(range(10), 0, control.service)
    control.clock.now = other.clock.now + 1
    control.service.start_rollout(ROLLOUT)
    other.clock.now = control.clock.now
    other.serve(range(10, 20), 0, control.service, params={"routing": {"threshold": 0.2}})
    other.serve(range(20, 30), 0, control.service, parent="r1")
    other.serve(range(30, 40), 0, control.service, arm="canary", policy_name="an-earlier-rollout")
    other.close_segments()
    control.close_segments()
    assert sum(control.fold()["units"].values()) == 0


def test_a_follower_rules_nothing_and_says_who_does(pair: tuple[Gateway, Gateway]) -> None:
    _, other = pair
    for write in (
        lambda: other.service.start_rollout(ROLLOUT),
        lambda: other.service.promote("looser"),
        lambda: other.service.abort("looser"),
        lambda: other.service.pause("looser"),
        lambda: other.service.resume("looser"),
        lambda: other.service.orders,
    ):
        with pytest.raises(Exception, match="follows http://control:1"):
            write()


def test_a_silent_control_is_an_alert(pair: tuple[Gateway, Gateway]) -> None:
    _, other = pair
    other.service.monitor.judge()
    assert [alert["name"] for alert in other.service.alerts()["data"]] == ["ControlSilent"]

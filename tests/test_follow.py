"""Followers: the control's arms here too, across restarts and silence, whatever it answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import httpx
import msgspec
import pytest

from alerts.canaries import Canaries
from alerts.follow import MOST_BYTES, Control, ControlAway, Follower
from alerts.orders import BadOrders, Orders, Split
from alerts.plan import Plan
from alerts.rollout import Limits, arm_of
from gateway.core import Accept, Mode
from gateway.policy import Policy
from gateway.router import FEATURES, Router

STABLE = Policy(threshold=0.6, large_token_budget=40, accept=Accept.THRESHOLD)
CANARY = Policy(
    mode=Mode.ROUTED,
    router=Router((0.0,) * 8, (1.0,) * 8, ((0.5,) * len(FEATURES),), (0.1,), (2.0,), -0.25),
)
ORDERS = Orders("a", STABLE, Split("salt", 0.25, "looser", CANARY))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class House:
    """A follower whose control answers what it is told to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = Clock()
        self.answer: httpx.Response | Exception = httpx.Response(200, content=ORDERS.body)
        self.asked: list[httpx.Request] = []
        self.open()

    def open(self) -> None:
        self.applied: list[Orders] = []
        control = Control("http://control:1", "key", silent_s=30.0)
        transport = httpx.MockTransport(self._respond)
        self.follower = Follower(control, self.folder, self.applied.append, self.clock, transport)

    def _respond(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        if isinstance(self.answer, Exception):
            raise self.answer
        if request.headers.get("if-none-match") == ORDERS.etag and self.answer.content == ORDERS.body:
            return httpx.Response(304)
        return httpx.Response(self.answer.status_code, content=self.answer.content)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    built = House(tmp_path)
    yield built
    built.follower.stop()


def test_orders_survive_the_wire() -> None:
    assert Orders.read(ORDERS.body) == ORDERS
    assert Orders.read(ORDERS.body).split.policy.hash == CANARY.hash  # type: ignore[union-attr]
    assert Orders.read(Orders("a", Policy()).body) == Orders("a", Policy())
    assert Orders("a", STABLE).etag != ORDERS.etag


def test_it_applies_what_it_hears_once(house: House) -> None:
    house.follower.poll()
    house.follower.poll()
    assert house.applied == [ORDERS]
    assert house.asked[0].headers["authorization"] == "Bearer key"
    assert [r.headers.get("if-none-match") for r in house.asked] == [None, ORDERS.etag]


def test_silence_means_stable_and_a_word_ends_it(house: House) -> None:
    house.follower.poll()
    house.answer = httpx.ConnectError("refused")
    house.clock.now += 29
    with pytest.raises(ControlAway, match="http://control:1 does not answer"):
        house.follower.poll()
    house.follower.check()
    assert (house.follower.silent, house.applied) == (False, [ORDERS])
    house.clock.now += 1
    house.follower.check()
    house.follower.check()
    assert house.follower.silent
    assert house.applied == [ORDERS, Orders("a", STABLE)]
    house.answer = httpx.Response(200, content=ORDERS.body)
    house.follower.poll()
    assert house.applied[2:] == [ORDERS]


def test_a_restart_goes_on_with_the_last_orders_while_they_hold(house: House) -> None:
    house.follower.poll()
    house.clock.now += 29
    house.open()
    assert house.applied == [ORDERS]
    house.clock.now += 1
    house.open()
    assert house.applied == [Orders("a", STABLE)]


def test_a_state_loaded_after_the_orders_does_not_undo_them(house: House) -> None:
    """A restart hears the last orders first, then loads its own rollouts, of which it may have one."""
    house.follower.poll()
    ruled = Canaries(Policy(), Limits(), gated=False)
    ruled.start(Plan("own", {}, "pepper"), CANARY, 0.0)
    for state in (Canaries(Policy(), Limits(), gated=False).to_dict(), ruled.to_dict()):
        again = Canaries(Policy(), Limits(), gated=False)
        again.follow(house.applied[0])
        again.load(msgspec.json.decode(msgspec.json.encode(state)))
        assert again.orders == ORDERS


def test_a_clock_set_back_makes_no_old_orders_young(house: House) -> None:
    house.follower.poll()
    house.clock.now -= 500
    house.open()
    house.clock.now += 30
    assert house.follower.silent


def test_a_damaged_file_is_set_aside(house: House) -> None:
    (house.folder / "followed.json").write_text('{"heard": 1, "orders": "{}"}')
    house.open()
    assert house.applied == []
    assert (house.folder / "followed.json.damaged").exists()


def changed(**changes: object) -> bytes:
    return json.dumps({**json.loads(ORDERS.body), **changes}).encode()


def canary(**changes: object) -> bytes:
    return changed(canary={**json.loads(ORDERS.body)["canary"], **changes})


HOSTILE = {
    "no JSON": b"<html>",
    "other JSON": b"[]",
    "more than asked": changed(more=1),
    "no policy": changed(stable={"threshold": "high"}),
    "a policy out of range": changed(stable={**asdict(STABLE), "draft_length": 10**9}),
    "an unknown rule": changed(stable={"accept": "hope"}),
    "an unknown key": changed(stable={"shell": "rm"}),
    "a conflict": changed(stable={"large_token_budget": 3}),
    "a router of other shapes": changed(stable={"router": {"mean": [1]}}),
    "a router of words": changed(stable={"router": {**asdict(CANARY.router), "bias": "x"}}),  # type: ignore[call-overload]
    "a weight beyond all": canary(weight=2.0),
    "no salt": canary(salt=""),
    "a long name": canary(name="x" * 129),
    "bytes": b"\xff\xfe",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_no_order_changes_nothing(house: House, what: str) -> None:
    with pytest.raises(BadOrders):
        Orders.read(HOSTILE[what])
    house.follower.poll()
    house.answer = httpx.Response(200, content=HOSTILE[what])
    with pytest.raises(ControlAway, match="is no control"):
        house.follower.poll()
    assert house.applied == [ORDERS]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (httpx.Response(401, content=b"no"), "answers 401"),
        (httpx.Response(409, content=b"x"), "answers 409"),
        (httpx.Response(302, headers={"location": "http://evil/"}), "answers 302"),
        (httpx.Response(304), "answers 304"),
        (httpx.Response(200, content=b" " * (MOST_BYTES + 1)), "more than"),
    ],
)
def test_other_answers_are_silence(house: House, answer: httpx.Response, why: str) -> None:
    house.answer = answer
    with pytest.raises(ControlAway, match=why):
        house.follower.poll()
    assert (house.applied, len(house.asked)) == ([], 1)


def test_an_end_does_not_wait_for_an_answer_that_is_held_back(tmp_path: Path) -> None:
    asked, held = threading.Event(), threading.Event()

    def respond(_: httpx.Request) -> httpx.Response:
        asked.set()
        held.wait(30)
        return httpx.Response(200, content=ORDERS.body)

    applied: list[Orders] = []
    follower = Follower(
        Control("http://control:1"), tmp_path, applied.append, transport=httpx.MockTransport(respond)
    )
    follower.start()
    assert asked.wait(10)
    follower.stop()
    held.set()
    follower._thread.join(10)
    assert applied == []
    assert not (tmp_path / "followed.json").exists()


def test_a_sticky_user_has_one_arm_on_all() -> None:

    control = Canaries(STABLE, Limits(), gated=False, control="a")
    plan = Plan(name="looser", canary={}, salt="s1", steps=(0.3,))
    control.start(plan, CANARY, now=0.0)
    follower = Canaries(Policy(), Limits(), gated=False)
    follower.follow(Orders.read(control.orders.body))
    for i in range(300):
        here, there = control.assign("r1", f"u{i}"), follower.assign("r2", f"u{i}")
        assert (here.arm, here.policy, here.policy_name) == (there.arm, there.policy, there.policy_name)
        assert here.user_hash == there.user_hash
        assert here.arm == arm_of("s1", f"u{i}", 0.3)
    assert follower.stable == STABLE


def test_the_body_is_what_the_readme_says() -> None:
    body = msgspec.json.decode(ORDERS.body)
    assert set(body) == {"control", "stable", "canary"}
    assert set(body["canary"]) == {"name", "salt", "weight", "policy"}

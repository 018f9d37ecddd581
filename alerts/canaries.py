"""The one active rollout and those before it: who gets which policy, what counts, and what is kept."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from alerts.answers import Answer, is_judged
from alerts.orders import Orders, Split
from alerts.plan import Plan
from alerts.rollout import (
    Limits,
    Rollout,
    Transition,
    Verdict,
    WrongState,
    arm_of,
    comparable_metrics,
    user_hash_of,
)
from gateway.core import Mode
from gateway.policy import Policy
from gateway.request import Request

CONTROL = "control"
"""What a gateway without a name is called."""
NUM_WORST = 3
_MOST_SCORABLE = 50_000
_KEPT_ENDED = 50


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one request gets: its arm, and the policy in force there before its own `routing` keys.

    user_hash: names the sticky key to the evidence; None where the request is its own key.
    """

    arm: str
    policy_name: str
    policy: Policy
    user_hash: str | None = None


class Canaries:
    """Rollouts by name, at most one of them active. Not thread-safe but for `assign`."""

    def __init__(self, stable: Policy, limits: Limits, gated: bool, control: str = CONTROL) -> None:
        """stable: the policy in force. gated: whether promotions wait for a gate. control: this gateway's
        name, for those that follow it."""
        # Swapped as a whole: readers take no lock.
        self.orders = Orders(control, stable)
        self.limits = limits
        self.gated = gated
        self.current: Rollout | None = None
        self.worst: list[tuple[float, str]] = []
        self._canary: Policy | None = None
        self._led = False
        self._ended: dict[str, dict[str, Any]] = {}
        self._scorable: dict[str, str] = {}
        self._scored: set[tuple[str, str]] = set()

    @property
    def stable(self) -> Policy:
        """The policy in force."""
        return self.orders.stable

    def follow(self, orders: Orders) -> None:
        """Do as another gateway says, from here on; a rollout of one's own gives no orders any more."""
        self._led = True
        self.orders = orders

    # --- requests ---

    def assign(self, request_id: str, sticky: str | None = None) -> Assignment:
        """Arm and policy for a request; sticky: the key that keeps its arm, by default the id. Any thread."""
        orders = self.orders
        split, stable = orders.split, orders.stable
        if split is None:
            return Assignment("stable", "stable", stable)
        user_hash = None if sticky is None else user_hash_of(split.salt, sticky)
        if arm_of(split.salt, request_id if sticky is None else sticky, split.weight) == "canary":
            return Assignment("canary", split.name, split.policy, user_hash)
        return Assignment("stable", "stable", stable, user_hash)

    def admit(self, request: Request, now: float) -> None:
        """A request was admitted."""
        rollout = self.current
        if rollout is None or not counts(request):
            return
        if rollout.admit(request.id, request.arm, request.user_hash, now, is_judged(request)) == "fresh":
            self._scorable[request.id] = request.arm
            if len(self._scorable) > _MOST_SCORABLE:
                self._scorable.pop(next(iter(self._scorable)))

    def admit_elsewhere(self, request: Request) -> bool:
        """A request that another gateway answered; False where that gateway had not yet heard of the rollout,
        or of its end, so that it says nothing of the policies compared here.
        """
        rollout = self.current
        if rollout is None or not rollout.active:
            return request.arm == "stable"
        expected = rollout.plan.name if request.arm == "canary" else "stable"
        if request.received < rollout.started or request.policy_name != expected:
            return False
        self.admit(request, request.received)
        return True

    def lose(self, request_id: str, now: float) -> None:
        """An admitted request whose end nobody saw."""
        if self.current is not None:
            self.current.observe(request_id, {}, now)

    def observe(self, answer: Answer, now: float) -> None:
        """An answer is complete."""
        rollout = self.current
        if rollout is None or not rollout.active:
            return
        rollout.observe(answer.request_id, answer.values, now)
        if answer.arm == "canary" and answer.request_id in self._scorable:
            heapq.heappush(self.worst, (answer.worst, answer.request_id))
            if len(self.worst) > NUM_WORST:
                heapq.heappop(self.worst)

    def score(self, request_id: str, name: str, value: float) -> None:
        """A task score for an answer of the active rollout; others are not evidence."""
        arm = self._scorable.get(request_id)
        if self.current is None or arm is None or (request_id, name) in self._scored:
            return
        self._scored.add((request_id, name))
        self.current.score(request_id, arm, name, value)

    @property
    def worst_traces(self) -> list[str]:
        """Ids of the worst canary answers, worst first."""
        return [request_id for _, request_id in sorted(self.worst, reverse=True)]

    # --- rollouts ---

    def start(
        self, plan: Plan, canary: Policy, now: float, baselines: Mapping[str, float] | None = None
    ) -> Rollout:
        """Start a rollout of a policy, its name new or an ended one's; raises WrongState while one is active.

        Under the canary the plan's audit_rate holds; a promotion leaves the policy's own.
        """
        if self.current is not None and self.current.active:
            raise WrongState(f"rollout {self.current.plan.name!r} is active")
        self._retire()
        self._ended.pop(plan.name, None)
        metrics = comparable_metrics(self.stable.verified, canary.verified)
        self.current = Rollout(plan, metrics, now, self.limits, baselines, self.gated)
        self._canary = canary
        self.worst, self._scorable, self._scored = [], {}, set()
        self._refresh()
        return self.current

    def act(self, act: Callable[[Rollout], Any]) -> list[Transition]:
        """Do something to the current rollout; the transitions it caused. The policies follow its verdict."""
        rollout = self.current
        if rollout is None:
            return []
        before = len(rollout.history)
        act(rollout)
        promoted = rollout.verdict is Verdict.PROMOTED and len(rollout.history) > before
        self._refresh(self._canary if promoted else None)
        return rollout.history[before:]

    def _refresh(self, promoted: Policy | None = None) -> None:
        if self._led:
            return
        rollout, canary, split = self.current, self._canary, None
        if rollout is not None and canary is not None and rollout.active:
            audited = replace(canary, audit_rate=rollout.plan.audit_rate)
            split = Split(rollout.plan.salt, rollout.weight, rollout.plan.name, audited)
        self.orders = Orders(self.orders.control, promoted or self.stable, split)

    def _retire(self) -> None:
        if self.current is not None:
            self._ended[self.current.plan.name] = self.current.summary()
            while len(self._ended) > _KEPT_ENDED:
                self._ended.pop(next(iter(self._ended)))

    def find(self, name: str) -> dict[str, Any] | None:
        """One rollout as `GET /v1/rollouts/{name}` tells it."""
        if self.current is not None and self.current.plan.name == name:
            return self.current.summary()
        return self._ended.get(name)

    def list(self) -> list[dict[str, Any]]:
        """All rollouts, newest first."""
        current = [self.current.summary()] if self.current is not None else []
        return [*current, *reversed(self._ended.values())]

    # --- restarts ---

    def to_dict(self) -> dict[str, Any]:
        """The whole state in plain values, but for the stable policy."""
        return {
            "current": self.current.to_dict() if self.current is not None else None,
            "canary": asdict(self._canary) if self._canary is not None else None,
            "worst": self.worst,
            "ended": self._ended,
            "scorable": self._scorable,
            "scored": sorted(self._scored),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `to_dict` wrote down; what was in flight then is missing."""
        if state["current"] is not None:
            self.current = Rollout.from_dict(state["current"])
            self.current.units.lose_pending()
        self._canary = Policy.of(state["canary"]) if state["canary"] is not None else None
        self.worst = [(badness, request_id) for badness, request_id in state["worst"]]
        self._ended = dict(state["ended"])
        self._scorable = dict(state["scorable"])
        self._scored = {(request_id, name) for request_id, name in state["scored"]}
        self._refresh()


def counts(request: Request) -> bool:
    """Whether a request is evidence: forks, requests that set their own routing, and shadowed ones are not.

    A request with several choices counts by its first.
    """
    first = request.choice == 0 and request.parent is None
    return first and request.params.get("routing") is None and request.policy.mode is not Mode.SHADOW

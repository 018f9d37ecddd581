"""The one active rollout and those before it: who gets which policy, what counts, and what is kept."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from alerts.answers import Answer, is_judged
from alerts.plan import Plan
from alerts.rollout import Limits, Rollout, Transition, Verdict, WrongState, arm_of, comparable_metrics
from gateway.core import Accept, Mode
from gateway.policy import Policy
from gateway.request import Request
from gateway.router import Router

NUM_WORST = 3
_MOST_SCORABLE = 50_000
_KEPT_ENDED = 50


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one request gets: its arm, and the policy in force there before its own `routing` keys."""

    arm: str
    policy_name: str
    policy: Policy


@dataclass(frozen=True, slots=True)
class _Split:
    """What assigning an arm needs, swapped as a whole: readers take no lock."""

    salt: str
    weight: float
    canary_name: str
    canary: Policy


class Canaries:
    """Rollouts by name, at most one of them active. Not thread-safe but for `assign`."""

    def __init__(self, stable: Policy, limits: Limits, gated: bool) -> None:
        """stable: the policy in force. gated: whether promotions wait for a gate."""
        self.stable = stable
        self.limits = limits
        self.gated = gated
        self.current: Rollout | None = None
        self.worst: list[tuple[float, str]] = []
        self._canary: Policy | None = None
        self._ended: dict[str, dict[str, Any]] = {}
        self._scorable: dict[str, str] = {}
        self._scored: set[tuple[str, str]] = set()
        self._split: _Split | None = None

    # --- requests ---

    def assign(self, key: str) -> Assignment:
        """Arm and policy for a key; any thread."""
        split, stable = self._split, self.stable
        if split is not None and arm_of(split.salt, key, split.weight) == "canary":
            return Assignment("canary", split.canary_name, split.canary)
        return Assignment("stable", "stable", stable)

    def admit(self, request: Request, key: str | None, now: float) -> None:
        """A request was admitted; key: its sticky key, None where it is its own."""
        rollout = self.current
        if rollout is None or not counts(request):
            return
        if rollout.admit(request.id, request.arm, key, now, is_judged(request)) == "fresh":
            self._scorable[request.id] = request.arm
            if len(self._scorable) > _MOST_SCORABLE:
                self._scorable.pop(next(iter(self._scorable)))

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
        if rollout.verdict is Verdict.PROMOTED and len(rollout.history) > before and self._canary is not None:
            self.stable = self._canary
        self._refresh()
        return rollout.history[before:]

    def _refresh(self) -> None:
        rollout, canary = self.current, self._canary
        if rollout is None or canary is None or not rollout.active:
            self._split = None
        else:
            audited = replace(canary, audit_rate=rollout.plan.audit_rate)
            self._split = _Split(rollout.plan.salt, rollout.weight, rollout.plan.name, audited)

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
        self._canary = policy_from(state["canary"]) if state["canary"] is not None else None
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


def policy_from(fields: Mapping[str, Any]) -> Policy:
    """The policy whose `dataclasses.asdict` this is; raises TypeError or ValueError if it is none."""
    router = fields.get("router")
    read = {
        "mode": Mode(fields["mode"]),
        "accept": Accept(fields["accept"]),
        "router": None if router is None else Router.of(router),
    }
    return Policy(**{**fields, **read})

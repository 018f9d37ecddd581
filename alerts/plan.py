"""What a rollout is asked to do, checked field by field, and how long its verdict will take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from alerts.losses import BY_NAME, CLIP
from alerts.sequential import units_until

DEFAULT_STEPS = (0.05, 0.25, 0.5)
_KEYS = {"name", "canary", "weight", "steps", "margin", "alpha", "min_units", "min_step_s", "audit_rate"}
_NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


class FieldError(ValueError):
    """A value that cannot be used; `param` names the field and the message starts with it."""

    def __init__(self, param: str, why: str) -> None:
        super().__init__(f"{param}: {why}")
        self.param = param


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked rollout: contract's `POST /v1/rollouts` with every default filled in.

    steps: ascending weights in (0, 1), the first is where it starts. margin: in agreement.
    min_units, min_step_s: what a step needs before the next. audit_rate: share of canary requests audited.
    """

    name: str
    canary: Mapping[str, Any]
    salt: str
    steps: tuple[float, ...] = DEFAULT_STEPS
    margin: float = 0.01
    alpha: float = 0.05
    min_units: int = 50
    min_step_s: float = 60.0
    audit_rate: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        """The plan in plain values."""
        return {**asdict(self), "canary": dict(self.canary), "steps": list(self.steps)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Plan:
        """The plan that `to_dict` wrote down."""
        return cls(**{**state, "steps": tuple(state["steps"])})


def parse_plan(body: object, salt: str) -> Plan:
    """The plan a client's body asks for; raises FieldError naming the field."""
    if not isinstance(body, Mapping):
        raise FieldError("body", "must be a JSON object")
    # JSON null means absent, as everywhere in the API.
    given = {key: value for key, value in body.items() if value is not None}
    unknown = sorted(set(given) - _KEYS)
    if unknown:
        raise FieldError(str(unknown[0]), "unknown field")
    name = given.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= 128 or not set(name) <= _NAME_CHARS:
        raise FieldError("name", "must be 1 to 128 of letters, digits, '.', '_' and '-'")
    canary = given.get("canary")
    if not isinstance(canary, Mapping):
        raise FieldError("canary", "must be an object of policy overrides")
    return Plan(
        name=name,
        canary=dict(canary),
        salt=salt,
        steps=_steps(given),
        margin=_number(given, "margin", 0.01, 0.0, CLIP / 4),
        alpha=_number(given, "alpha", 0.05, 1e-6, 0.5),
        min_units=int(_number(given, "min_units", 50, 1, 1_000_000, whole=True)),
        min_step_s=_number(given, "min_step_s", 60.0, 0.0, 30 * 86400.0),
        audit_rate=_number(given, "audit_rate", 1.0, 0.0, 1.0),
    )


def _steps(given: Mapping[str, Any]) -> tuple[float, ...]:
    weight = _number(given, "weight", 0.0, 0.0001, 1.0) if "weight" in given else None
    steps = given.get("steps")
    if steps is None:
        steps = [weight] if weight is not None else list(DEFAULT_STEPS)
    if not isinstance(steps, Sequence) or isinstance(steps, str) or not 1 <= len(steps) <= 100:
        raise FieldError("steps", "must be a list of 1 to 100 weights")
    weights = [_number({f"steps[{i}]": step}, f"steps[{i}]", 0, 0.0001, 1.0) for i, step in enumerate(steps)]
    if any(b <= a for a, b in pairwise(weights)):
        raise FieldError("steps", "must rise from step to step")
    if weight is not None:
        weights = [weight, *(step for step in weights if step > weight)]
    if weights[-1] == 1.0:
        # All traffic on the canary leaves nobody to compare with: the last step to 1 is the promotion.
        weights.pop()
    if not weights:
        raise FieldError(
            "steps" if weight is None else "weight", "must start below 1: a stable arm is needed"
        )
    return tuple(weights)


def _number(
    given: Mapping[str, Any], key: str, default: float, low: float, high: float, whole: bool = False
) -> float:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise FieldError(key, "must be a number")
    if whole and value != int(value):
        raise FieldError(key, "must be a whole number")
    if not low <= value <= high:
        raise FieldError(key, f"must be between {low:g} and {high:g}")
    return float(value)


def estimate(plan: Plan, stable_agreement: Sequence[float] = (), seed: int = 0) -> dict[str, Any]:
    """How many canary units and how many requests of all arms a verdict will take: simulated medians.

    stable_agreement: recent agreement of stable requests; below 50 of them a typical spread (mean .92)
    stands in, and `basis` says so. A rollback is simulated at 5 points lower agreement, a promotion at none.
    """
    rng = np.random.default_rng(seed)
    blocks, runs = 1500, 101
    measured = len(stable_agreement) >= 50
    stable_per_block = max(1, min(4, round(1 / plan.steps[0]) - 1))

    pool = 1.0 - np.asarray(stable_agreement) if measured else rng.beta(0.64, 7.36, 4096)

    def draw(*shape: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.asarray(pool[rng.integers(0, len(pool), shape)], dtype=np.float64)

    def loss(disagreement: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.asarray(np.minimum(disagreement, CLIP) / CLIP)

    stable = loss(draw(blocks, runs, stable_per_block)).mean(axis=2)
    canary = draw(blocks, runs)
    weight = BY_NAME["agreement"].weight
    margin = plan.margin / CLIP
    harm = units_until(loss(canary + 0.05) - stable, margin, "harm", plan.alpha, weight)
    passing = units_until(loss(canary) - stable, margin, "pass", plan.alpha)
    rollback = max(plan.min_units, int(np.median(harm)))
    promote = max(plan.min_units * len(plan.steps), int(np.median(passing)))
    return {
        "rollback_units": rollback,
        "rollback_requests": requests_for(plan, rollback),
        "promote_units": promote,
        "promote_requests": requests_for(plan, promote),
        "basis": "recent stable traffic" if measured else "a typical spread: too little traffic so far",
    }


def requests_for(plan: Plan, units: int) -> int:
    """Requests of all arms until the canary has so many units, climbing the steps as fast as they allow.

    Counts one unit a request: fewer where users send several in a window, or where not all are audited.
    """
    requests = 0.0
    for step, weight in enumerate(plan.steps):
        here = units if step == len(plan.steps) - 1 else min(units, plan.min_units)
        requests += here / (weight * plan.audit_rate) if plan.audit_rate else math.inf
        units -= here
    return math.ceil(requests) if math.isfinite(requests) else -1

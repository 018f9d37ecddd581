"""Drift without a canary: stable traffic against its own beginning under the same policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alerts.losses import BY_NAME, to_loss
from alerts.sequential import ECusum

NUM_BASELINE = 200
"""Answers whose mean loss is what later ones are held against."""

WATCHED = ("agreement", "mean_logp_large", "guard_hits", "errors")


class Drift:
    """One e-CUSUM a metric: loss minus the mean of the first 200 answers, at twice the metric's margin.

    The doubled margin leaves room for the error of that mean. A new policy starts it anew.
    """

    def __init__(self, policy_hash: str) -> None:
        """policy_hash: of the stable policy in force."""
        self.policy_hash = policy_hash
        self._first: dict[str, list[float]] = {name: [0, 0.0] for name in WATCHED}
        self._cusums = {name: ECusum(2 * BY_NAME[name].margin) for name in WATCHED}

    def observe(self, values: Mapping[str, float | None], judged: bool) -> None:
        """One stable answer's metrics; judged: whether its agreement was going to be known."""
        for name in WATCHED:
            if BY_NAME[name].audited and not judged:
                continue
            loss = to_loss(name, values.get(name), None)
            loss = 1.0 if loss is None else loss
            first = self._first[name]
            if first[0] < NUM_BASELINE:
                first[0] += 1
                first[1] += (loss - first[1]) / first[0]
            else:
                self._cusums[name].update(loss - first[1])

    @property
    def evidence(self) -> dict[str, float]:
        """The e-CUSUM of each metric; it calls at evidence.DRIFT_LIMIT."""
        return {name: cusum.value for name, cusum in self._cusums.items()}

    def to_dict(self) -> dict[str, Any]:
        """The whole state in plain values."""
        return {
            "policy_hash": self.policy_hash,
            "first": self._first,
            "cusums": {name: cusum.to_dict() for name, cusum in self._cusums.items()},
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Drift:
        """The state that `to_dict` wrote down."""
        drift = cls(state["policy_hash"])
        drift._first = {name: list(first) for name, first in state["first"].items()}
        drift._cusums = {name: ECusum.from_dict(cusum) for name, cusum in state["cusums"].items()}
        return drift

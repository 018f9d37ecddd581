"""The evidence of one rollout: every metric's units, blocks and processes, and what they add up to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from alerts.losses import BY_NAME, CLIP, SCORES_WEIGHT, Metric
from alerts.sequential import Blocks, ECusum, EProcess

DRIFT_LIMIT = 1000.0
"""The e-CUSUM calls at this value: at least as many blocks, on average, between calls without drift."""

_AUDIBLE = 4.0
"""Evidence from which a metric is named as a cause."""

_FEWEST_FAST = 5
"""Canary units before a fast metric may roll back."""


class Comparison:
    """One metric in both arms.

    Keys seen for the first time feed all three processes. A key that returns in a later window repeats
    its own level, so it says nothing new about which arm is better; it only feeds a second e-CUSUM, with
    the change against its own past.
    """

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.harm = EProcess("harm", metric.margin)
        self.passing = EProcess("pass", metric.margin)
        self.cusum = ECusum(metric.margin)
        self.returning_cusum = ECusum(metric.margin)
        self.units = {"stable": 0, "canary": 0}
        self.missing = {"stable": 0, "canary": 0}
        self._sums = {"stable": 0.0, "canary": 0.0}
        self._values = {"stable": [0.0, 0.0], "canary": [0.0, 0.0]}
        self._fresh = Blocks()
        self._returning = Blocks()

    def admit(self, unit: str, arm: str, returning: bool = False) -> None:
        """A unit arrives: its block is settled now, whatever becomes of it."""
        (self._returning if returning else self._fresh).admit(unit, arm == "canary")

    def resolve(self, unit: str, arm: str, loss: float | None, before: float | None = None) -> None:
        """A unit's loss in [0, 1], None if missing; before: the key's own mean so far, if it returns."""
        if before is None:
            if self._fresh.resolve(unit, loss):
                self._count(arm, loss)
        elif self._returning.resolve(unit, (1.0 if loss is None else loss) - before):
            self._count(arm, loss)
        for for_harm, for_pass in self._fresh.take():
            self.harm.update(for_harm)
            self.cusum.update(for_harm)
            self.passing.update(for_pass)
        for change, _ in self._returning.take():
            self.returning_cusum.update(change)

    def _count(self, arm: str, loss: float | None) -> None:
        self.units[arm] += 1
        self.missing[arm] += loss is None
        self._sums[arm] += 1.0 if loss is None else loss

    @property
    def drift(self) -> float:
        """The mean of both e-CUSUMs, itself one."""
        return (self.cusum.value + self.returning_cusum.value) / 2

    def note(self, arm: str, value: float | None) -> None:
        """Keep the metric's own value for the words of an alert; evidence uses losses only."""
        if value is not None:
            self._values[arm][0] += 1
            self._values[arm][1] += value

    def mean_value(self, arm: str) -> float | None:
        """Mean of the metric itself, where it was known."""
        count, total = self._values[arm]
        return total / count if count else None

    def mean(self, arm: str) -> float | None:
        """Mean loss of an arm so far, None before its first unit."""
        return self._sums[arm] / self.units[arm] if self.units[arm] else None

    def to_dict(self) -> dict[str, Any]:
        """The whole state in plain values."""
        metric = self.metric
        return {
            "metric": [
                metric.name, metric.weight, metric.margin, metric.fast, metric.audited, metric.baseline
            ],
            "harm": self.harm.to_dict(),
            "passing": self.passing.to_dict(),
            "cusum": self.cusum.to_dict(),
            "returning_cusum": self.returning_cusum.to_dict(),
            "units": self.units,
            "missing": self.missing,
            "sums": self._sums,
            "values": self._values,
            "fresh": self._fresh.to_dict(),
            "returning": self._returning.to_dict(),
        }  # fmt: skip

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Comparison:
        """The comparison that `to_dict` wrote down."""
        comparison = cls(Metric(*state["metric"]))
        comparison.harm = EProcess.from_dict(state["harm"])
        comparison.passing = EProcess.from_dict(state["passing"])
        comparison.cusum = ECusum.from_dict(state["cusum"])
        comparison.returning_cusum = ECusum.from_dict(state["returning_cusum"])
        comparison.units = dict(state["units"])
        comparison.missing = dict(state["missing"])
        comparison._sums = dict(state["sums"])
        comparison._values = {arm: list(pair) for arm, pair in state["values"].items()}
        comparison._fresh = Blocks.from_dict(state["fresh"])
        comparison._returning = Blocks.from_dict(state["returning"])
        return comparison


class Evidence:
    """All comparisons of one rollout; metric names are fixed at its start, task scores join as they come."""

    def __init__(self, metrics: Iterable[str], margin: float, alpha: float) -> None:
        """margin: in agreement, such as .01; alpha: how often a harmless canary may be rolled back."""
        self.alpha = alpha
        self.margin = margin
        self.comparisons: dict[str, Comparison] = {}
        for name in metrics:
            metric = BY_NAME[name]
            if name == "agreement":
                metric = Metric(name, metric.weight, margin / CLIP, metric.fast, metric.audited)
            self.comparisons[name] = Comparison(metric)

    @property
    def limit(self) -> float:
        """Wealth at which a verdict falls."""
        return 1 / self.alpha

    def score(self, unit: str, arm: str, name: str, value: float) -> None:
        """A task score in [0, 1] for a unit, given after its answer."""
        key = f"score:{name}"
        if key not in self.comparisons:
            k = 1 + sum(other.startswith("score:") for other in self.comparisons)
            self.comparisons[key] = Comparison(Metric(key, SCORES_WEIGHT / (k * (k + 1)), self.margin / CLIP))
        self.comparisons[key].admit(unit, arm)
        self.comparisons[key].note(arm, value)
        self.comparisons[key].resolve(unit, arm, 1.0 - value)

    @property
    def against(self) -> float:
        """Combined wealth against the canary; a metric without blocks counts as 1."""
        return 1 + sum(c.metric.weight * (c.harm.value - 1) for c in self.comparisons.values())

    @property
    def drift(self) -> float:
        """Combined e-CUSUM against the canary."""
        return 1 + sum(c.metric.weight * (c.drift - 1) for c in self.comparisons.values())

    @property
    def drifts(self) -> dict[str, float]:
        """The e-CUSUM of each metric; task scores, whose names are free, are one entry: `scores`."""
        named = {name: c.drift for name, c in self.comparisons.items() if not name.startswith("score:")}
        scored = [c.drift for name, c in self.comparisons.items() if name.startswith("score:")]
        return {**named, "scores": max(scored)} if scored else named

    def harmful(self, min_units: int) -> list[str]:
        """The metrics that speak against the canary, strongest first, if together they suffice; else []."""

        def strongest(name: str) -> float:
            comparison = self.comparisons[name]
            return -comparison.metric.weight * max(comparison.harm.value, comparison.drift)

        ordered = sorted(self.comparisons, key=strongest)
        loud = [
            name
            for name in ordered
            if self.comparisons[name].harm.value >= _AUDIBLE or self.comparisons[name].drift >= _AUDIBLE
        ]
        if self.canary_units >= min_units and (self.against >= self.limit or self.drift >= DRIFT_LIMIT):
            return loud
        # Breakage does not wait for min_units. This sum never exceeds `against`, so alpha still holds.
        fast = {
            name: c.metric.weight * c.harm.value
            for name, c in self.comparisons.items()
            if c.metric.fast and c.units["canary"] >= _FEWEST_FAST
        }
        return [name for name in loud if name in fast] if sum(fast.values()) >= self.limit else []

    def unproven(self, min_units: int) -> list[str]:
        """The metrics for which "worse by more than the margin" is not yet refuted.

        A task score counts once it has min_units canary units.
        """
        return [
            name
            for name, c in self.comparisons.items()
            if c.passing.value < self.limit
            and not (name.startswith("score:") and c.units["canary"] < min_units)
        ]

    @property
    def canary_units(self) -> int:
        """Canary units observed, of the metric that has most."""
        return max((c.units["canary"] for c in self.comparisons.values()), default=0)

    @property
    def stable_units(self) -> int:
        """Stable units observed, of the metric that has most."""
        return max((c.units["stable"] for c in self.comparisons.values()), default=0)

    def summary(self) -> dict[str, dict[str, Any]]:
        """Per metric: evidence against and for the canary, the limit, and both arms' numbers."""
        return {
            name: {
                "against": c.harm.value,
                "for": c.passing.value,
                "drift": c.drift,
                "limit": self.limit,
                "weight": c.metric.weight,
                "margin": c.metric.margin,
                "units": dict(c.units),
                "missing": dict(c.missing),
                "mean_loss": {arm: c.mean(arm) for arm in ("stable", "canary")},
                "mean": {arm: c.mean_value(arm) for arm in ("stable", "canary")},
            }
            for name, c in self.comparisons.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """The whole state in plain values."""
        return {
            "margin": self.margin,
            "alpha": self.alpha,
            "comparisons": {name: c.to_dict() for name, c in self.comparisons.items()},
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Evidence:
        """The evidence that `to_dict` wrote down."""
        evidence = cls((), state["margin"], state["alpha"])
        evidence.comparisons = {n: Comparison.from_dict(c) for n, c in state["comparisons"].items()}
        return evidence

"""Served metrics over a window: samples of a registry, and what increases, averages or is missing."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any

Key = tuple[str, tuple[tuple[str, str], ...]]
"""A series: its name and its labels, sorted."""

Samples = Mapping[Key, float]

_MOST_POINTS = 4096


def read_registry(families: Iterable[Any]) -> dict[Key, float]:
    """All samples of a Prometheus registry's `collect()`."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
        for family in families
        for sample in family.samples
    }


def pick(samples: Samples, metric: str, labels: Mapping[str, str]) -> list[float]:
    """The values of every series of the metric that has these labels."""
    wanted = set(labels.items())
    return [value for (name, have), value in samples.items() if name == metric and wanted <= set(have)]


def is_counter(metric: str) -> bool:
    """Whether a metric only grows, by Prometheus' naming."""
    return metric.endswith(("_total", "_count", "_sum", "_bucket"))


class Window:
    """The recent past of one number; None is "not there"."""

    def __init__(self, span_s: float) -> None:
        """span_s: seconds that are remembered, in a bounded number of points."""
        self.span_s = span_s
        self._times: list[float] = []
        self._values: list[float | None] = []
        # How much the number has grown in all up to each point, restarts forgiven.
        self._grown: list[float] = []

    def add(self, now: float, value: float | None) -> None:
        """The number now; times never go back."""
        grown = 0.0
        if self._times:
            # A counter that was not there has counted nothing yet; one that fell has started anew.
            before, after = self._values[-1] or 0.0, value or 0.0
            grown = self._grown[-1] + (after - before if after >= before else after)
        if len(self._times) >= 2 and now - self._times[-2] < self.span_s / _MOST_POINTS:
            self._cut(slice(-1, None))
        self._times.append(now)
        self._values.append(value)
        self._grown.append(grown)
        # One point from before the window stays, as the value the window began with.
        stale = bisect_right(self._times, now - self.span_s) - 1
        if stale > len(self._times) // 4:
            self._cut(slice(0, stale))

    def _cut(self, where: slice) -> None:
        del self._times[where], self._values[where], self._grown[where]

    def values(self, now: float, span_s: float) -> list[float]:
        """What was there during the last span_s seconds."""
        first = bisect_right(self._times, now - span_s)
        return [value for value in self._values[first:] if value is not None]

    def increase(self, now: float, span_s: float) -> float | None:
        """How much a counter grew in the last span_s seconds, restarts forgiven; None before two points."""
        if len(self._times) < 2:
            return None
        first = bisect_right(self._times, now - span_s)
        return self._grown[-1] - self._grown[max(first - 1, 0)]

    def covers(self, now: float, span_s: float) -> bool:
        """Whether the memory reaches back that far."""
        return bool(self._times) and self._times[0] <= now - span_s

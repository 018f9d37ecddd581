"""Advisor: threshold -> how much the small model would keep and how often the large model would agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gateway.intervals import wilson
from gateway.policy import Policy
from logs.labels import Labelled, labelled
from logs.reader import Reader, TraceFilter

GRID = tuple(round(i / 50, 2) for i in range(51))
"""Thresholds of the curve: 0, 0.02, ... 1."""


@dataclass(frozen=True, slots=True)
class Point:
    """One threshold.

    kept_share: labelled proposals with at least that score, over all of them. agreement: of those kept, the
    share that is the large model's own choice, with Wilson's 95 % interval [low, high] at the effective
    number of labels; None where nothing would be kept. labels: how many are kept.
    """

    threshold: float
    kept_share: float
    agreement: float | None
    low: float | None
    high: float | None
    labels: int


@dataclass(frozen=True, slots=True)
class Advice:
    """The curve and where it comes from: labels, requests, their time span, the threshold in force."""

    curve: list[Point]
    labels: int
    requests: int
    since: float | None
    until: float | None
    current: float


def advise(reader: Reader, policy: Policy, filters: TraceFilter | None = None) -> Advice:
    """The curve for a policy's score over the labels of the traces that the filters let through."""
    found = labelled(reader, policy, filters)
    return Advice(
        curve=curve(found),
        labels=len(found.score),
        requests=found.requests,
        since=found.since,
        until=found.until,
        current=policy.threshold,
    )


def curve(found: Labelled, thresholds: Sequence[float] = GRID) -> list[Point]:
    """A point for each threshold; no points without labels.

    Tokens of one request are not independent, so the true uncertainty is wider than the interval says.
    """
    if not len(found.score):
        return []
    order = np.argsort(-found.score, kind="stable")
    score, weight, agrees = found.score[order], found.weight[order], found.agrees[order]
    total, squared, agreed = np.cumsum(weight), np.cumsum(weight**2), np.cumsum(weight * agrees)
    points = []
    for threshold in thresholds:
        # Scores are float32, so the threshold is compared as the policy compares it.
        kept = int(np.searchsorted(-score, -np.float64(np.float32(threshold)), side="right"))
        if not kept:
            points.append(Point(threshold, 0.0, None, None, None, 0))
            continue
        share = float(agreed[kept - 1] / total[kept - 1])
        low, high = wilson(share, float(total[kept - 1] ** 2 / squared[kept - 1]))
        points.append(Point(threshold, float(total[kept - 1] / total[-1]), share, low, high, kept))
    return points

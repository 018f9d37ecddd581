"""A routing rule on prompts it has not seen: ranking, calibration, kept share at equal agreement."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from gateway.router import FEATURES
from gateway.tuning.compare import Difference

TARGETS = (0.98, 0.99, 0.995)
"""Agreements of kept tokens at which kept shares are compared."""

GAIN_RESAMPLES = 400


@dataclass(frozen=True, slots=True)
class Examples:
    """Labelled positions. x: [n, features]; agrees: bool [n]; weight: [n]; group: [n], the prompt of each.
    hidden: float16 [n, width], the small model's hidden states; width 0 where none are at hand."""

    x: np.ndarray
    agrees: np.ndarray
    weight: np.ndarray
    group: np.ndarray
    hidden: np.ndarray

    def __len__(self) -> int:
        return len(self.agrees)

    @property
    def gap(self) -> np.ndarray:
        """The plain gap, as the rule to beat."""
        return np.asarray(self.x[:, FEATURES.index("gap")])


def auroc(scores: np.ndarray, agrees: np.ndarray) -> float:
    """Chance that an agreeing position scores above a disagreeing one, ties counting half (Mann-Whitney)."""
    positive, negative = np.sort(scores[agrees]), scores[~agrees]
    if not positive.size or not negative.size:
        return float("nan")
    above = positive.size - np.searchsorted(positive, negative, side="right")
    equal = positive.size - above - np.searchsorted(positive, negative, side="left")
    return float((above + equal / 2).sum() / (positive.size * negative.size))


def calibration_error(p: np.ndarray, agrees: np.ndarray, bins: int = 15) -> float:
    """Expected calibration error: mean |agreement - p| over bins of equal width, weighted by their size."""
    index = np.minimum((p * bins).astype(int), bins - 1)
    total = 0.0
    for b in range(bins):
        inside = index == b
        if inside.any():
            total += inside.mean() * abs(float(agrees[inside].mean()) - float(p[inside].mean()))
    return float(total)


def kept_at(scores: np.ndarray, agrees: np.ndarray, target: float) -> float:
    """Largest share of positions that a threshold can keep with at least this agreement among them."""
    order = np.argsort(-scores, kind="stable")
    ranked, right = scores[order], np.cumsum(agrees[order])
    count = np.arange(1, len(scores) + 1)
    # Equal scores are kept together or not at all.
    ends = np.append(ranked[1:] != ranked[:-1], True)
    fine = ends & (right >= target * count)
    return float(count[fine].max() / len(scores)) if fine.any() else 0.0


@dataclass(frozen=True, slots=True)
class Judged:
    """A rule on prompts it has not seen. gain: kept share minus the gap's at equal agreement (the first
    target), with an interval over prompts; None for the gap itself."""

    name: str
    auroc: float
    calibration_error: float
    kept: dict[float, float]
    gain: Difference | None = None

    @property
    def beats_the_gap(self) -> bool:
        """Whether more is kept than by the gap, beyond the interval's doubt."""
        return self.gain is not None and self.gain.low > 0


def judge(name: str, scores: np.ndarray, data: Examples, target: float = TARGETS[1]) -> Judged:
    """Measures of one rule on held-out examples; compare with the gap at the same agreement by prompt."""
    judged = Judged(
        name,
        auroc(scores, data.agrees),
        calibration_error(scores, data.agrees),
        {t: kept_at(scores, data.agrees, t) for t in TARGETS},
    )
    if scores is data.gap or np.array_equal(scores, data.gap):
        return judged
    return replace(judged, gain=_gain(scores, data, target))


def _gain(scores: np.ndarray, data: Examples, target: float) -> Difference:
    """Kept share at the target, rule minus gap. Each resample of prompts finds both thresholds anew: where
    they lie is the larger part of the doubt."""
    members = [np.flatnonzero(data.group == g) for g in np.unique(data.group)]
    rng = np.random.default_rng(0)

    def gain(rows: np.ndarray) -> float:
        agrees = data.agrees[rows]
        return kept_at(scores[rows], agrees, target) - kept_at(data.gap[rows], agrees, target)

    drawn = (rng.integers(0, len(members), len(members)) for _ in range(GAIN_RESAMPLES))
    gains = [gain(np.concatenate([members[g] for g in draw])) for draw in drawn]
    low, high = np.quantile(gains, [0.025, 0.975])
    return Difference(gain(np.arange(len(data))), float(low), float(high))

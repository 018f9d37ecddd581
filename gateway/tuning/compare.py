"""Paired comparisons, prompt as the unit: bootstrap intervals of a mean difference, and McNemar's test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 4000


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean of a - b over the same prompts, with an interval [low, high]."""

    mean: float
    low: float
    high: float


def paired(a: Sequence[float], b: Sequence[float], confidence: float = 0.95, seed: int = 0) -> Difference:
    """The mean difference with its percentile bootstrap interval (Efron), prompts drawn with replacement.

    Raises ValueError for sequences that are empty or of different lengths.
    """
    if len(a) != len(b) or not a:
        raise ValueError("paired results must be of the same, non-empty prompts")
    difference = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, difference.size, (RESAMPLES, difference.size))
    means = difference[drawn].mean(axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Difference(float(difference.mean()), float(low), float(high))


@dataclass(frozen=True, slots=True)
class McNemar:
    """Prompts that only a got right, only b got right, and the exact two-sided p of "equally good"."""

    only_a: int
    only_b: int
    p: float


def mcnemar(a: Sequence[bool], b: Sequence[bool]) -> McNemar:
    """McNemar's exact test (1947): under equality each discordant prompt is a fair coin."""
    only_a = sum(x and not y for x, y in zip(a, b, strict=True))
    only_b = sum(y and not x for x, y in zip(a, b, strict=True))
    n, k = only_a + only_b, min(only_a, only_b)
    # Integers throughout: 2**n overflows a float beyond a thousand discordant prompts.
    p = min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n) if n else 1.0
    return McNemar(only_a, only_b, p)

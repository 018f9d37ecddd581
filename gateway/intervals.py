"""Confidence intervals for shares."""

from __future__ import annotations

import math
from statistics import NormalDist


def wilson(share: float, count: float, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval for a share seen in `count` (possibly effective) observations; Wilson 1927."""
    if count <= 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)

"""Is routing still routing? Decisions must follow the score, and tiers must keep their usual shares.

A router that decides at random, or always the same, serves on and shows in no error rate.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

_DECISIONS = 1000
_FEWEST_DECISIONS = 300
_LEAST_FOLLOWING = 0.98

_USUAL = 200
_RECENT = 50
_BAND = 0.25


class Liveness:
    """Watches the decisions and the small model's share of answers under one policy."""

    def __init__(self) -> None:
        self._followed: deque[bool] = deque(maxlen=_DECISIONS)
        self._count = 0
        self._mean = 0.0
        self._squares = 0.0
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def decisions(self, decisions: Iterable[tuple[bool, float]]) -> None:
        """Scored decisions: (kept, score minus threshold)."""
        self._followed.extend(kept == (margin >= 0) for kept, margin in decisions)

    def share(self, small: float) -> None:
        """The small model's share of one answer's tokens, 0..1."""
        if len(self._recent) == _RECENT and self._count < 10 * _USUAL:
            # What leaves the recent window becomes part of what is usual.
            self._learn(self._recent[0])
        self._recent.append(small)

    def _learn(self, value: float) -> None:
        self._count += 1
        delta = value - self._mean
        self._mean += delta / self._count
        self._squares += delta * (value - self._mean)

    @property
    def trouble(self) -> str | None:
        """What is wrong, in words; None while routing lives or too little is known."""
        if len(self._followed) >= _FEWEST_DECISIONS:
            following = sum(self._followed) / len(self._followed)
            if following < _LEAST_FOLLOWING:
                return (
                    f"only {following:.0%} of the last {len(self._followed)} scored decisions follow their "
                    f"score: the router does not decide by it"
                )
        if self._count >= _USUAL and len(self._recent) == _RECENT:
            recent = sum(self._recent) / _RECENT
            spread = math.sqrt(self._squares / self._count)
            band = max(_BAND, 4 * spread / math.sqrt(_RECENT))
            if abs(recent - self._mean) > band:
                return (
                    f"the small model wrote {recent:.0%} of the tokens of the last {_RECENT} answers; "
                    f"usual is {self._mean:.0%} plus or minus {band:.0%}"
                )
        return None

"""When does routing pay? Measured pass times, what drafts come to, and a running large-only clock.

A round of k drafts over R rows costs k small passes and one large pass over R * (k + 1) tokens; without
routing the same rows get one token each for a large pass over R tokens. Below the knee of the large model's
cost curve extra tokens are nearly free and drafts pay; above it they are full price and routing loses.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.core import Tier

REGRET_LIMIT = 0.03
"""Share of a large-only run's time that routing may lose before it is switched off for a while."""

GAIN_NEEDED = 1.05
"""Predicted speed-up below which drafts are not worth their risk."""

WINDOW_MS = 4000.0
"""Time constant of the running clocks."""

FIRST_HOLD_MS, LONGEST_HOLD_MS = 2000.0, 60000.0
"""How long routing stays off after a loss; doubled each time it loses again."""

EMA = 0.98


@dataclass(frozen=True, slots=True)
class CostTable:
    """Milliseconds of one tier's pass by number of tokens, piecewise linear between measured points."""

    tokens: tuple[int, ...]
    ms: tuple[float, ...]

    def __call__(self, num_tokens: float) -> float:
        """ms of a pass; beyond the last point as steep as between the last two."""
        xs, ys = self.tokens, self.ms
        if len(xs) == 1:
            return ys[0]
        i = min(max(bisect_left(xs, num_tokens), 1), len(xs) - 1)
        share = (num_tokens - xs[i - 1]) / (xs[i] - xs[i - 1])
        return max(ys[0], ys[i - 1] + share * (ys[i] - ys[i - 1]))


class Load:
    """Caps drafts by what they are worth now. `cap(num_rows)` is 0 while routing does not pay.

    keep: chance that a proposal is kept. hit, lookup_hit: chance that a kept, a looked-up token is accepted;
    running averages.
    """

    def __init__(self, costs: Mapping[Tier, CostTable], longest: int = 32) -> None:
        self.costs = dict(costs)
        self.longest = longest
        self.keep, self.hit, self.lookup_hit = 0.7, 0.9, 0.7
        self.spent_ms = 0.0
        self.large_only_ms = 0.0
        self.off_ms = 0.0
        self._hold_ms = FIRST_HOLD_MS
        self._since_off_ms = 0.0

    def cap(self, num_rows: int) -> int:
        """Most drafts a round should have with num_rows running: 0 where the large model alone is faster."""
        if self.off_ms > 0:
            return 0
        best, speed = self.best(num_rows)
        return best if speed >= GAIN_NEEDED else 0

    def cap_for(self, num_rows: int, debt: int, num_left: int) -> int:
        """`cap` for one row: 0 also where the small model would have to read `debt` tokens first and what is
        left to write (half of num_left, since answers end early) would not earn that back."""
        cap = self.cap(num_rows)
        if cap == 0 or debt <= 2 * self.longest:
            return cap
        _, speed = self.best(num_rows)
        saved_per_token = self.costs[Tier.LARGE](num_rows) / num_rows * (1 - 1 / speed)
        return cap if saved_per_token * num_left / 2 > self.costs[Tier.SMALL](debt) else 0

    def lookup_cap(self, num_rows: int) -> int:
        """Most looked-up tokens a round that pay: they cost only their share of the large pass."""
        large = self.costs[Tier.LARGE]
        best, speed, tokens = 0, GAIN_NEEDED / large(num_rows), 1.0
        for k in range(1, self.longest + 1):
            tokens += self.lookup_hit**k
            if tokens / large(num_rows * (k + 1)) > speed:
                best, speed = k, tokens / large(num_rows * (k + 1))
        return best

    def best(self, num_rows: int) -> tuple[int, float]:
        """The draft length with the most expected tokens per ms, and its speed-up over large-only."""
        alone = 1 / self.costs[Tier.LARGE](num_rows)
        best, speed = 0, 1.0
        for k in range(1, self.longest + 1):
            tokens, ms = self._round(num_rows, k)
            if tokens / ms > speed * alone:
                best, speed = k, tokens / ms / alone
        return best, speed

    def _round(self, num_rows: int, k: int) -> tuple[float, float]:
        """Expected tokens a row, and ms, of one round of up to k drafts."""
        good = self.keep * self.hit
        tokens = 1 + sum(good**i for i in range(1, k + 1))
        small, reach, drafted = self.costs[Tier.SMALL], 1.0, 0.0
        ms = 0.0
        for i in range(k):
            # The first proposal also reads the large model's last token.
            ms += reach * small(num_rows * (2 if i == 0 else 1))
            drafted += reach * self.keep
            reach *= self.keep
        return tokens, ms + self.costs[Tier.LARGE](num_rows * (1 + drafted))

    def saw_proposal(self, kept: bool) -> None:
        """The router kept, or deferred, a proposal of the small model."""
        self.keep = EMA * self.keep + (1 - EMA) * kept

    def saw_verified(self, tier: Tier, num_accepted: int, num_examined: int) -> None:
        """Of num_examined drafts of a tier the first num_accepted stood."""
        for i in range(num_examined):
            hit = i < num_accepted
            if tier is Tier.LOOKUP:
                self.lookup_hit = EMA * self.lookup_hit + (1 - EMA) * hit
            else:
                self.hit = EMA * self.hit + (1 - EMA) * hit

    def saw_pass(self, ms: float, num_tokens: int, num_rows: int) -> None:
        """A pass of `ms` committed num_tokens while num_rows decoded; keeps the clocks and switches."""
        if self.off_ms > 0:
            self.off_ms -= ms
            if self.off_ms <= 0:
                self.spent_ms = self.large_only_ms = self._since_off_ms = 0.0
            return
        self._since_off_ms += ms
        fade = max(0.0, 1 - ms / WINDOW_MS)
        alone = self.costs[Tier.LARGE](num_rows) / num_rows if num_rows else 0.0
        self.spent_ms = self.spent_ms * fade + ms
        self.large_only_ms = self.large_only_ms * fade + num_tokens * alone
        warm = self._since_off_ms >= WINDOW_MS / 2
        if warm and self.spent_ms > (1 + REGRET_LIMIT) * self.large_only_ms:
            self.off_ms = self._hold_ms
            self._hold_ms = min(2 * self._hold_ms, LONGEST_HOLD_MS)
        elif self._since_off_ms >= LONGEST_HOLD_MS:
            self._hold_ms = FIRST_HOLD_MS

"""When does routing pay? Measured pass times, what drafts come to, and a running large-only clock.

A round of k drafts over R rows costs k small passes and one large pass over R * (k + 1) tokens; without
routing the same rows get one token each for a large pass over R tokens. Below the knee of the large model's
cost curve extra tokens are nearly free and drafts pay; above it they are full price and routing loses.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
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

BELIEVED = (0.7, 0.95, 0.7, 0.45, 0.8)
"""What keep, hit, lookup_hit, ride_hit and guess_hit are taken for before anything was seen: what the default
pair comes to on mixed prompts, so that drafts are tried wherever they may pay."""

BELIEF_WORTH = 10
"""Observations that a belief counts as much as: a workload unlike it shows after a few rounds."""

SETTLED = 8
"""Tokens that the small model lacks of a row it has been drafting for: what a round left it, no debt."""

FORGET = 0.002
"""Share by which a pass brings back to that what is not tried now, so that it is tried again some day."""

PACE_EMA = 0.9
"""Weight of the past in a tier's pace."""

MOST_SLOWER = 10.0
"""A pass that took longer than this many times its table was interrupted: it says nothing of the pace."""


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


@dataclass(frozen=True, slots=True)
class Round:
    """What a round of draft and verify is expected to come to: tokens a row, ms of each model's passes."""

    drafts: int
    tokens: float
    small_ms: float
    large_ms: float

    @property
    def per_ms(self) -> float:
        """Tokens a row and millisecond."""
        return self.tokens / (self.small_ms + self.large_ms)


class Load:
    """Caps drafts by what they are worth now. `cap(num_rows)` is 0 while routing does not pay.

    With middle tiers what a draft comes to is not predicted, only the running clock speaks: drafts are capped
    to none while it says that they lose.

    keep: chance that a proposal is kept. hit, lookup_hit: chance that a kept, a looked-up token is accepted;
    rides: whether deferred tokens may ride along at all.
    ride_hit, guess_hit: chance that a deferred token, one guessed where the large model writes, is its own;
    running averages. pace: how much longer than its table a tier's passes take now, since a shared machine is
    not always as fast as when it was measured.
    """

    def __init__(
        self, costs: Mapping[Tier, CostTable], longest: int = 32, *, ride_along: bool | None = False
    ) -> None:
        self.costs = dict(costs)
        self.rides = ride_along is not False
        self.pace = dict.fromkeys(self.costs, 1.0)
        self.longest = longest
        self.keep, self.hit, self.lookup_hit, self.ride_hit, self.guess_hit = BELIEVED
        self.spent_ms = 0.0
        self.large_only_ms = 0.0
        self.off_ms = 0.0
        self._hold_ms = FIRST_HOLD_MS
        self._since_off_ms = 0.0
        self._num_seen: Counter[str] = Counter()
        # What is best changes with every pass, but not between the rows of one.
        self._best: dict[int, tuple[int, float]] = {}
        self._lookup_best: dict[int, int] = {}
        self._guess_best: dict[int, int] = {}
        self._verify_ms: dict[int, tuple[float, ...]] = {}

    def cap(self, num_rows: int) -> int:
        """Most drafts a round should have with num_rows running: 0 where the large model alone is faster."""
        if self.off_ms > 0:
            return 0
        if len(self.costs) > 2:
            return self.longest
        best, speed = self.best(num_rows)
        return best if speed >= GAIN_NEEDED else 0

    def cap_for(self, num_rows: int, debt: int, num_left: int) -> int:
        """`cap` for one row: 0 also where the small model would have to read `debt` tokens first and what is
        left to write (half of num_left, since answers end early) would not earn that back."""
        cap = self.cap(num_rows)
        if cap == 0 or debt <= SETTLED or len(self.costs) > 2:
            return cap
        _, speed = self.best(num_rows)
        saved_per_token = self._ms(Tier.LARGE, num_rows) / num_rows * (1 - 1 / speed)
        return cap if saved_per_token * num_left / 2 > self._ms(Tier.SMALL, debt) else 0

    def _ms(self, tier: Tier, num_tokens: float) -> float:
        return self.costs[tier](num_tokens) * self.pace[tier]

    def lookup_cap(self, num_rows: int) -> int:
        """Most looked-up tokens a round that pay: they cost only their share of the large pass."""
        if num_rows not in self._lookup_best:
            self._lookup_best[num_rows] = self._best_length(num_rows, self.lookup_hit)
        return self._lookup_best[num_rows]

    def gathers(self, num_tokens: int, num_rows: int, num_drafting: int) -> bool:
        """Whether a large pass over num_tokens of num_rows rows should wait for the num_drafting that draft.

        It should while the rows that one more small pass is expected to bring make it worth more tokens per
        ms, their share of that small pass included; what the others draft meanwhile they would draft anyway.
        """
        if len(self.costs) > 2:
            return False
        joins = num_drafting * (1 - self.keep)
        now = num_rows / self._ms(Tier.LARGE, num_tokens)
        small_ms = (1 - self.keep) * self._ms(Tier.SMALL, num_drafting)
        large_ms = self._ms(Tier.LARGE, num_tokens * (1 + joins / num_rows))
        return (num_rows + joins) / (small_ms + large_ms) > now

    def ride_pays(self, num_rows: int) -> bool:
        """Whether a deferred token should ride along with the large pass: it costs its share of that, and
        saves a token's pass where it stands."""
        if not self.rides:
            return False
        large = self.costs[Tier.LARGE]
        drafts = min(self.longest, self.keep / (1 - self.keep)) if self.keep < 1 else self.longest
        with_drafts = num_rows * (1 + drafts)
        return large(with_drafts + num_rows) - large(with_drafts) < self.ride_hit * large(num_rows)

    def guess_cap(self, num_rows: int) -> int:
        """Most tokens that the small model should guess to ride along where the large model writes anyway."""
        if self.off_ms > 0:
            return 0
        if num_rows not in self._guess_best:
            first_ms, next_ms = self._ms(Tier.SMALL, 2 * num_rows), self._ms(Tier.SMALL, num_rows)
            self._guess_best[num_rows] = self._best_length(num_rows, self.guess_hit, first_ms, next_ms)
        return self._guess_best[num_rows]

    def _best_length(self, num_rows: int, hit: float, first_ms: float = 0.0, next_ms: float = 0.0) -> int:
        """How many tokens, each right with chance `hit`, are worth most in one large pass; the first of a row
        costs first_ms to come by, each more next_ms."""
        best, speed = 0, GAIN_NEEDED * self.large_only(num_rows).per_ms
        tokens, small_ms, right, pace = 1.0, first_ms, 1.0, self.pace[Tier.LARGE]
        for k, ms in enumerate(self._verifying(num_rows), start=1):
            right *= hit
            tokens += right
            per_ms = tokens / (small_ms + ms * pace)
            if per_ms > speed:
                best, speed = k, per_ms
            small_ms += next_ms
        return best

    def _verifying(self, num_rows: int) -> tuple[float, ...]:
        """ms by the table of large passes over num_rows rows with 1, 2, ... drafts each; asked for at every
        pass, and always the same."""
        if num_rows not in self._verify_ms:
            large = self.costs[Tier.LARGE]
            self._verify_ms[num_rows] = tuple(large(num_rows * (k + 1)) for k in range(1, self.longest + 1))
        return self._verify_ms[num_rows]

    def saw_rider(self, stood: bool, *, guessed: bool) -> None:
        """A token that rode along, guessed or deferred, was the large model's own, or was not."""
        if guessed:
            self.guess_hit = self._learnt("guess", self.guess_hit, stood)
        else:
            self.ride_hit = self._learnt("ride", self.ride_hit, stood)

    def _learnt(self, name: str, now: float, seen: bool) -> float:
        """A chance after one more observation: a mean with the belief at first, then a running one."""
        self._num_seen[name] += 1
        return now + max(1 - EMA, 1 / (BELIEF_WORTH + self._num_seen[name])) * (seen - now)

    def best(self, num_rows: int) -> tuple[int, float]:
        """The draft length with the most expected tokens per ms, and its speed-up over large-only."""
        if num_rows not in self._best:
            self._best[num_rows] = self._find_best(num_rows)
        return self._best[num_rows]

    def _find_best(self, num_rows: int) -> tuple[int, float]:
        alone = self.large_only(num_rows)
        best, speed = 0, 1.0
        for expected in self.rounds(num_rows):
            if expected.per_ms > speed * alone.per_ms:
                best, speed = expected.drafts, expected.per_ms / alone.per_ms
        return best, speed

    def large_only(self, num_rows: int) -> Round:
        """One token of the large model for each row."""
        return Round(0, 1.0, 0.0, self._ms(Tier.LARGE, num_rows))

    def rounds(self, num_rows: int) -> Iterator[Round]:
        """What rounds of at most 1, 2, ... drafts come to while num_rows decode."""
        good, small = self.keep * self.hit, self._ms(Tier.SMALL, num_rows)
        # The first proposal also reads the large model's last token.
        small_ms = self._ms(Tier.SMALL, 2 * num_rows)
        ride = self.ride_hit if self.ride_pays(num_rows) else 0.0
        tokens, reach, drafted, rode, riders = 1.0, 1.0, 0.0, 0.0, 0.0
        for k in range(1, self.longest + 1):
            # A round that ends with a deferral before its k-th draft has one more token where that rode well.
            rode += good ** (k - 1) * (1 - self.keep) * ride
            riders += reach * (1 - self.keep) if ride else 0.0
            tokens += good**k
            drafted += reach * self.keep
            large_ms = self._ms(Tier.LARGE, num_rows * (1 + drafted + riders))
            yield Round(k, tokens + rode, small_ms, large_ms)
            reach *= self.keep
            small_ms += reach * small

    def saw_proposal(self, kept: bool) -> None:
        """The router kept, or deferred, a proposal of the small model."""
        self.keep = self._learnt("keep", self.keep, kept)

    def saw_verified(self, tier: Tier, num_accepted: int, num_examined: int) -> None:
        """Of num_examined drafts of a tier the first num_accepted stood."""
        for i in range(num_examined):
            hit = i < num_accepted
            if tier is Tier.LOOKUP:
                self.lookup_hit = self._learnt("lookup", self.lookup_hit, hit)
            else:
                self.hit = self._learnt("hit", self.hit, hit)

    def saw_pass(
        self, tier: Tier, ms: float, num_fed: int, num_written: int, num_rows: int, num_prompt: int = 0
    ) -> None:
        """A tier's pass of `ms` over num_fed tokens wrote num_written while num_rows decoded.

        num_prompt: tokens of prompts among those fed. Their share of the time is on no clock: the large model
        reads them without routing too, and whether the small one's reading pays `cap_for` says beforehand.
        """
        self._changed()
        self._keep_pace(tier, ms, num_fed)
        ms *= 1 - num_prompt / num_fed
        if self.off_ms > 0:
            self.off_ms -= ms
            if self.off_ms <= 0:
                self.spent_ms = self.large_only_ms = self._since_off_ms = 0.0
            return
        self._forget(num_rows)
        self._since_off_ms += ms
        fade = max(0.0, 1 - ms / WINDOW_MS)
        alone = self._ms(Tier.LARGE, num_rows) / num_rows if num_rows else 0.0
        self.spent_ms = self.spent_ms * fade + ms
        self.large_only_ms = self.large_only_ms * fade + num_written * alone
        warm = self._since_off_ms >= WINDOW_MS / 2
        if warm and self.spent_ms > (1 + REGRET_LIMIT) * self.large_only_ms:
            self.off_ms = self._hold_ms
            self._hold_ms = min(2 * self._hold_ms, LONGEST_HOLD_MS)
        elif self._since_off_ms >= LONGEST_HOLD_MS:
            self._hold_ms = FIRST_HOLD_MS

    def _changed(self) -> None:
        self._best.clear()
        self._lookup_best.clear()
        self._guess_best.clear()

    def _forget(self, num_rows: int) -> None:
        """A chance that nothing is staked on is seen no more: what was believed of it comes back."""
        off = self.cap(num_rows) == 0
        untried = (
            off,
            off,
            off or not self.lookup_cap(num_rows),
            off or not self.ride_pays(num_rows),
            off or not self.guess_cap(num_rows),
        )
        seen = (self.keep, self.hit, self.lookup_hit, self.ride_hit, self.guess_hit)
        self.keep, self.hit, self.lookup_hit, self.ride_hit, self.guess_hit = (
            (1 - FORGET) * now + FORGET * then if rests else now
            for now, then, rests in zip(seen, BELIEVED, untried, strict=True)
        )

    def _keep_pace(self, tier: Tier, ms: float, num_fed: int) -> None:
        slower = ms / self.costs[tier](num_fed)
        self.pace[tier] = PACE_EMA * self.pace[tier] + (1 - PACE_EMA) * min(slower, MOST_SLOWER)

"""When the large model is elsewhere: how many drafts are worth a call, by its measured round trip.

Every row's call goes out on its own, so what a call costs depends on the positions it asks about, not on the
other rows; only the small model's passes are shared. The longer the round trip, the more drafts a call should
carry. Calls overlap, so a running clock of what the large model alone would have cost cannot be kept, and
routing is never switched off for a while: the cap of each round says what pays.
"""

from __future__ import annotations

from gateway.core import Tier
from gateway.load import Load


class Distance(Load):
    """Load with costs[Tier.LARGE] in milliseconds a call, by the positions asked about."""

    def cap_for(self, num_rows: int, debt: int, num_left: int) -> int:
        """Most drafts of one row's next round; reading its arrears costs the small model no call."""
        return self.cap(num_rows)

    def lookup_cap(self, num_rows: int) -> int:
        """Most looked-up tokens a call that pay."""
        if num_rows not in self._lookup_best:
            tokens = [1.0]
            for k in range(1, self.longest + 1):
                tokens.append(tokens[-1] + self.lookup_hit**k)
            rates = [num / self._ms(Tier.LARGE, k + 1) for k, num in enumerate(tokens)]
            self._lookup_best[num_rows] = max(range(len(rates)), key=rates.__getitem__)
        return self._lookup_best[num_rows]

    def _find_best(self, num_rows: int) -> tuple[int, float]:
        """The drafts of a whole round that was guessed right are made while it is verified, and cost only
        what they take longer than that."""
        alone = 1 / self._ms(Tier.LARGE, 1)
        good, small = self.keep * self.hit, self._ms(Tier.SMALL, num_rows)
        small_ms = self._ms(Tier.SMALL, 2 * num_rows)
        tokens, reach, drafted = 1.0, 1.0, 0.0
        best, speed = 0, 1.0
        for k in range(1, self.longest + 1):
            tokens += good**k
            drafted += reach * self.keep
            call = self._ms(Tier.LARGE, 1 + drafted)
            survives = good**k * self.hit
            ms = call + (1 - survives) * small_ms + survives * max(0.0, small_ms - call)
            if tokens / ms > speed * alone:
                best, speed = k, tokens / ms / alone
            reach *= self.keep
            small_ms += reach * small
        return best, speed

    def saw_pass(
        self, tier: Tier, ms: float, num_fed: int, num_written: int, num_rows: int, num_prompt: int = 0
    ) -> None:
        """A pass of the small model."""
        self._changed()
        self._keep_pace(tier, ms, num_fed)

    def saw_call(self, ms: float, num_asked: int, num_rows: int) -> None:
        """A call to the large model about num_asked positions came back after `ms`, num_rows decoding."""
        self._changed()
        self._keep_pace(Tier.LARGE, ms, num_asked)
        self._forget(num_rows)

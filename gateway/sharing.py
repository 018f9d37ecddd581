"""Prompts that begin alike, in rows that run at the same time: one row reads, the others copy what it read.

Only the prompt is shared: drafts and guesses may be rolled back, a prompt is not. Where a row of the same
scope (API key) is about to read what is common at the same tier, the others wait for it there. Of such rows
the one that has read most goes on, of equals the one that came first, so the order is strict: two never wait
for each other, and the foremost waits for none. A row that is gone leaves what it had read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.core import Tier
from gateway.load import CostTable
from gateway.prefix import LEAST_TOKENS, common_length
from gateway.row import Row
from gateway.scheduler import SHORT_FEED
from gateway.tier import Scorer


@dataclass(frozen=True, slots=True)
class Kin:
    """Another row, how many tokens of its prompt one's own may take over, and whether it came first."""

    row: Row
    num: int
    first: bool


class Sharing:
    """tiers: those that run here. costs: what their passes take (None: waiting always pays)."""

    def __init__(self, tiers: Mapping[Tier, Scorer], costs: Mapping[Tier, CostTable] | None) -> None:
        self.tiers = tiers
        self.costs = costs
        self._kin: dict[int, dict[int, Kin]] = {}

    def join(self, row: Row, running: Sequence[Row]) -> None:
        """A row starts beside those running; what they have read of its prompt it has from now on."""
        mine: dict[int, Kin] = {}
        for other in running:
            if other.request.scope != row.request.scope:
                continue
            num = common_length(row.request.prompt_ids, other.request.prompt_ids)
            if num >= LEAST_TOKENS:
                mine[id(other)] = Kin(other, _may_take(row, num), True)
                self._kin[id(other)][id(row)] = Kin(row, _may_take(other, num), False)
        self._kin[id(row)] = mine
        for tier in self.tiers:
            self._catch_up(row, tier)

    def leave(self, row: Row) -> None:
        """A row goes, and its blocks with it: what it has read of others' prompts they have from now on."""
        for key, kin in self._kin.pop(id(row)).items():
            num = self._kin[key].pop(id(row)).num
            for tier in self.tiers:
                self._copy(row, kin.row, tier, min(num, row.seen[tier]))

    def ready(self, rows: Sequence[Row]) -> list[Row]:
        """Those of the rows that do not wait for another; each has what others have read at its tier."""
        return [row for row in rows if self._catch_up(row, row.tier)]

    def _catch_up(self, row: Row, tier: Tier) -> bool:
        """Give a row what others have read of its prompt at the tier, unless one is about to read enough
        more: whether it need not wait for that."""
        seen = row.seen[tier]
        if row.num_prompt - seen <= LEAST_TOKENS:
            return True
        source, read, promised, alike = row, seen, seen, 0
        for kin in self._kin[id(row)].values():
            num, ahead = kin.num, kin.row.seen[tier]
            if min(num, ahead) > read:
                source, read = kin.row, min(num, ahead)
            # What is short is read in the next pass; what is long may wait for others, and takes several.
            if not kin.row.reads(tier) or (_is_long(kin.row, tier) and not _is_long(row, tier)):
                continue
            alike += ahead < num
            if ahead > seen or (kin.first and ahead == seen):
                promised = max(promised, num)
        if promised - read >= LEAST_TOKENS and self._pays(tier, promised - read, alike):
            return False
        self._copy(source, row, tier, read)
        return True

    def _copy(self, source: Row, row: Row, tier: Tier, num: int) -> None:
        """Give a row the first num tokens that another has read, where that is worth it."""
        if num - row.seen[tier] >= LEAST_TOKENS:
            self.tiers[tier].copy_prefix(source.blocks, row.blocks, num)
            row.seen[tier] = num

    def _pays(self, tier: Tier, num: int, alike: int) -> bool:
        """Whether the time that `alike` others spend on reading `num` tokens along with one row is more than
        that of the further pass that waiting may cost."""
        if self.costs is None:
            return True
        cost = self.costs[tier]
        return cost((alike + 1) * num) - cost(num) > cost(1)


def _may_take(row: Row, num_common: int) -> int:
    """Tokens that a row need not read itself. The last prompt token is always read anew, since its logits
    decide the first output token; whoever is owed views of the prompt reads all of it."""
    return 0 if row.request.prompt_logprobs else min(num_common, row.num_prompt - 1)


def _is_long(row: Row, tier: Tier) -> bool:
    return row.num_unseen(tier) > SHORT_FEED

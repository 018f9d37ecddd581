"""Which tier runs next, and on which rows.

Each tier has its own ready set; a tick runs one tier over its ready rows. Nothing is in lockstep: rows that
need a stronger model gather while others draft, as long as that pays and until the oldest of them has waited
`large_wait_s`; from then on the tier whose oldest row is older goes first, so none starves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from gateway.core import MODELS, Tier

SHORT_FEED = 64
"""Up to this many new tokens a row counts as decoding; beyond, it prefills and shares the chunk budget."""


class Ready(Protocol):
    """A row that can run: its tier, since when, its new tokens, how many of them must stay together, and
    whether its client still waits for a first token."""

    tier: Tier
    ready_since: float

    @property
    def starts(self) -> bool: ...

    def num_unseen(self, tier: Tier) -> int: ...

    def num_together(self, tier: Tier) -> int: ...


Gathers = Callable[[int, int, int], bool]
"""(tokens, rows, drafting) -> whether a large pass over these had better wait for rows that still draft."""

R = TypeVar("R", bound=Ready)


@dataclass(frozen=True, slots=True)
class Plan(Generic[R]):
    """One pass: a tier, its rows, and how many new tokens each row feeds."""

    tier: Tier
    rows: tuple[R, ...]
    num_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scheduler:
    """large_wait_s: longest a row waits for company before a pass of a model other than the small one. It
    does not wait for its first token.

    prefill_chunk: most prefill tokens a pass."""

    large_wait_s: float
    prefill_chunk: int

    def plan(self, rows: Sequence[R], now: float, gathers: Gathers | None = None) -> Plan[R] | None:
        """The next pass, or None when no row is ready; gathers: whether waiting pays (None: it always does).

        A row whose ready_since lies ahead can wait until then: it runs before only when nobody else is ready.
        """
        due = [row for row in rows if row.ready_since <= now] or rows
        ready: dict[Tier, list[R]] = {tier: [] for tier in MODELS}
        for row in sorted(due, key=lambda row: row.ready_since):
            ready[row.tier].append(row)
        tier = self._pick(ready, now, gathers)
        return None if tier is None else self._fill(tier, ready[tier])

    def _pick(self, ready: dict[Tier, list[R]], now: float, gathers: Gathers | None) -> Tier | None:
        oldest = {tier: rows[0].ready_since for tier, rows in ready.items() if rows}
        if not oldest:
            return None
        weakest, *stronger = oldest
        due = [tier for tier in stronger if self._is_due(tier, ready[tier], ready[weakest], now, gathers)]
        # Of equally old rows the stronger tier's go first.
        return min([*reversed(due), weakest], key=oldest.__getitem__)

    def _is_due(
        self, tier: Tier, waiting: list[R], drafting: list[R], now: float, gathers: Gathers | None
    ) -> bool:
        if now - waiting[0].ready_since >= self.large_wait_s or any(row.starts for row in waiting):
            return True
        if gathers is None or tier is not Tier.LARGE:
            return False
        return not gathers(sum(row.num_unseen(tier) for row in waiting), len(waiting), len(drafting))

    def _fill(self, tier: Tier, ready: list[R]) -> Plan[R]:
        """Decoding rows all run; prefilling rows share what is left of the chunk, oldest first."""
        chosen: list[R] = []
        nums: list[int] = []
        left = self.prefill_chunk
        for row in ready:
            unseen = row.num_unseen(tier)
            if unseen > SHORT_FEED:
                num = unseen if unseen <= left else min(left, unseen - row.num_together(tier))
                if num <= 0:
                    continue
                left -= num
                unseen = num
            chosen.append(row)
            nums.append(unseen)
        return Plan(tier, tuple(chosen), tuple(nums))

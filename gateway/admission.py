"""From a waiting request to a row with KV blocks, and the blocks' way back."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gateway.cache import BlockPool
from gateway.core import Mode, Tier, Timings
from gateway.lookup import NgramIndex
from gateway.policy import History
from gateway.prefix import Kept, PrefixCache
from gateway.request import Request
from gateway.row import Row
from gateway.text import TextStream, Tokenizer
from gateway.tier import Scorer


class Admission:
    """Gives rows their blocks and what earlier rows left in theirs. prefixes: finished rows kept for that.

    elsewhere: tiers that keep what they have read where they run.
    """

    def __init__(
        self,
        tiers: Mapping[Tier, Scorer],
        tokenizer: Tokenizer,
        pool: BlockPool,
        prefixes: PrefixCache,
        max_model_len: int,
        elsewhere: Collection[Tier] = (),
    ) -> None:
        self.tiers = tiers
        self.elsewhere = elsewhere
        self.tokenizer = tokenizer
        self.pool = pool
        self.prefixes = prefixes
        self.max_model_len = max_model_len

    def fits_ever(self, request: Request) -> bool:
        """Whether the request fits when nothing else runs."""
        return self.pool.blocks_for(self._longest(request)) <= self.pool.num_blocks

    def admit(self, request: Request, timings: Timings, now: float) -> Row | None:
        """A row for the request, or None while there is no room."""
        longest = self._longest(request)
        if not self._make_room(longest):
            return None
        timings.admitted = now
        sampling = request.sampling
        row = Row(
            request=request,
            history=History(request.policy),
            tokenizer=self.tokenizer,
            text=TextStream(
                self.tokenizer,
                stop=sampling.stop,
                include_stop=sampling.include_stop_str_in_output,
                skip_special_tokens=sampling.skip_special_tokens,
            ),
            blocks=self.pool.allocate(longest),
            max_len=self.max_model_len,
            timings=timings,
            ready_since=now,
            sequence=list(request.prompt_ids),
            seen=dict.fromkeys((*self.tiers, *self.elsewhere), 0),
        )
        self._reuse_prefix(row)
        if request.policy.mode is Mode.SHADOW:
            row.shadowed = History(request.policy)
        if request.policy.mode is Mode.ROUTED and request.policy.lookup:
            row.lookup = NgramIndex(request.prompt_ids)
        if request.constraint is not None:
            row.constraint = request.constraint()
        return row

    def release(self, row: Row) -> None:
        """Take a row's blocks back; those it has filled may serve as another's beginning."""
        longest = max(row.seen.values())
        num = self.pool.blocks_for(longest)
        self.pool.release(row.blocks[num:])
        kept = Kept(row.request.scope, tuple(row.sequence[:longest]), row.blocks[:num], dict(row.seen))
        for blocks in self.prefixes.keep(kept):
            self.pool.release(blocks)

    def _longest(self, request: Request) -> int:
        return min(len(request.prompt_ids) + request.sampling.max_tokens, self.max_model_len)

    def _make_room(self, length: int) -> bool:
        """Whether a row of `length` fits, finished rows' kept blocks given up for it if need be."""
        while not self.pool.can_allocate(length) and len(self.prefixes):
            self.pool.release(self.prefixes.evict())
        return self.pool.can_allocate(length)

    def _reuse_prefix(self, row: Row) -> None:
        if row.request.prompt_logprobs:
            return
        for name, tier in self.tiers.items():
            found = self.prefixes.find(row.request.scope, row.request.prompt_ids, name)
            if found is None:
                continue
            kept, num = found
            # The last prompt token is always read anew: its logits decide the first output token.
            row.seen[name] = min(num, row.num_prompt - 1)
            tier.copy_prefix(kept.blocks, row.blocks, row.seen[name])

"""The decoder forward over static shapes, for a GPU: every pass padded to a bucket, every bucket one graph.

A small decode pass is hundreds of kernels, and launching them takes longer than running them. A CUDA graph
launches all at once, but only ever the same work on the same addresses: so rows, tokens a row and pages a row
are rounded up to a few sizes, and a pass is written into its bucket's own input. Padding reads and writes a
spare page that no row owns. Prompts run without a graph: their passes are long enough.
Without CUDA the same code runs as it stands, which is how it is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gateway.cache import KVCache
from gateway.layout import Feed, Forward
from gateway.torch_decoder import TorchDecoder

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = (1, 2, 4, 8, 16, 33)
"""Sizes that rows and tokens of a row are rounded up to; a pass beyond them is not padded. 33: the longest
draft and the token before it."""


class Bucket(NamedTuple):
    """Shape of a padded pass. pages: KV blocks a row; steps: tokens drafted behind it."""

    rows: int
    tokens: int
    pages: int
    steps: int = 0


class Drafts(NamedTuple):
    """said: logits and attention entropies where the feeds want them, then behind each drafted token, step by
    step, row by row. tokens: what was drafted and fed, int64 [steps, rows]."""

    said: Forward
    tokens: Tensor


class Fed(NamedTuple):
    """A padded pass on the device, int64: each token's id, position, block and offset [rows, tokens]; each
    row's block table [rows, pages]."""

    tokens: Tensor
    positions: Tensor
    blocks: Tensor
    offsets: Tensor
    table: Tensor


class Batch:
    """A bucket's input: one buffer on the device that a pass is copied into. last: each row's last token."""

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        rows, tokens, pages, _ = bucket
        self.bucket = bucket
        self.whole = torch.zeros(rows * (4 * tokens + pages + 1), dtype=torch.int64, device=device)
        flat, table, self.last = torch.split(self.whole, [rows * tokens * 4, rows * pages, rows])
        ids, positions, blocks, offsets = flat.view(4, rows, tokens)
        self.fed = Fed(ids, positions, blocks, offsets, table.view(rows, pages))

    def fill(self, feeds: Sequence[Feed], block_size: int, spare: int) -> None:
        """Copy a pass in, in one go; padding writes to the spare block."""
        rows, tokens, pages, _ = self.bucket
        columns: list[list[int]] = [[], [], [], []]
        table: list[int] = []
        last: list[int] = []
        for feed in feeds:
            pad = tokens - len(feed.tokens)
            positions = range(feed.start, feed.start + len(feed.tokens))
            columns[0] += chain(feed.tokens, repeat(0, pad))
            columns[1] += chain(positions, repeat(0, pad))
            columns[2] += chain((feed.blocks[p // block_size] for p in positions), repeat(spare, pad))
            columns[3] += chain((p % block_size for p in positions), repeat(0, pad))
            table += _exactly(pages, feed.blocks, spare)
            last.append(len(feed.tokens) - 1)
        missing = rows - len(feeds)
        for column, value in zip(columns, (0, 0, spare, 0), strict=True):
            column += repeat(value, missing * tokens)
        table += repeat(spare, missing * pages)
        last += repeat(0, missing)
        self.whole.copy_(torch.tensor([*chain(*columns), *table, *last], dtype=torch.int64))


Work = Callable[[Batch], tuple[Tensor, ...]]
"""What a bucket computes from its input, on the device alone."""


class StaticDecoder(TorchDecoder):
    """TorchDecoder's weights over bucketed passes."""

    num_spare_blocks = 1

    def __init__(self, hf: Any) -> None:
        super().__init__(hf)
        self._batches: dict[Bucket, Batch] = {}
        self.graphs: dict[Bucket, Callable[[], tuple[Tensor, ...]]] = {}
        self._pool: Any = None

    def __call__(self, feeds: Sequence[Feed], cache: KVCache) -> Forward:
        """One pass; padded to its bucket where there is one."""
        longest = max(len(feed.tokens) for feed in feeds)
        if longest > TOKENS[-1] or len(feeds) > ROWS[-1]:
            return super().__call__(feeds, cache)
        bucket = _bucket(feeds, longest, 0, cache.block_size)
        hidden, entropy = self._run(bucket, feeds, cache, lambda batch: self._pass(batch.fed, cache))
        wanted = torch.tensor(list(_wanted(feeds, bucket.tokens)), dtype=torch.int64, device=self.device)
        h = hidden[wanted]
        return Forward(self._logits(h), entropy[wanted], self._normed(h))

    def draft(self, feeds: Sequence[Feed], steps: int, vocab_size: int, cache: KVCache) -> Drafts | None:
        """Feed, then `steps` times feed each row's likeliest token below vocab_size, all as one pass. None
        beyond the buckets. Every feed must want its last logits.

        The keys and values of tokens drafted beyond a row's blocks are lost in the spare block.
        """
        longest = max(len(feed.tokens) for feed in feeds)
        if longest > TOKENS[-1] or len(feeds) > ROWS[-1]:
            return None
        bucket = _bucket(feeds, longest, steps, cache.block_size)
        hidden, entropy, logits, entropies, tokens = self._run(
            bucket, feeds, cache, lambda batch: self._drafts(batch, steps, vocab_size, cache)
        )
        rows, num = bucket.rows, len(feeds)
        # The logits behind last tokens are there; those wanted before them are not.
        wanted = list(_wanted(feeds, bucket.tokens))
        ends = {row * bucket.tokens + len(feed.tokens) - 1: row for row, feed in enumerate(feeds)}
        before = [flat for flat in wanted if flat not in ends]
        if before:
            at = torch.tensor(before, device=self.device)
            logits = torch.cat([logits, self._logits(hidden[at])])
            entropies = torch.cat([entropies, entropy[at]])
        place = {flat: (1 + steps) * rows + i for i, flat in enumerate(before)} | ends
        index = [place[flat] for flat in wanted]
        index += [step * rows + row for step in range(1, steps + 1) for row in range(num)]
        chosen = torch.tensor(index, device=self.device)
        return Drafts(Forward(logits[chosen], entropies[chosen]), tokens[:, :num])

    def _run(
        self,
        bucket: Bucket,
        feeds: Sequence[Feed],
        cache: KVCache,
        work: Work,
    ) -> tuple[Tensor, ...]:
        """What `work` gives for the feeds as a batch of that bucket; recorded at the bucket's first use."""
        if bucket not in self._batches:
            self._batches[bucket] = Batch(bucket, self.device)
        batch = self._batches[bucket]
        batch.fill(feeds, cache.block_size, cache.num_blocks)
        if bucket not in self.graphs:
            self.graphs[bucket] = self._record(batch, work)
        return self.graphs[bucket]()

    def _record(self, batch: Batch, work: Work) -> Callable[[], tuple[Tensor, ...]]:
        """Something to call whenever the batch was filled anew: a captured graph, or the work itself."""
        if self.device.type != "cuda":
            return partial(work, batch)
        # Once outside, on another stream: what libraries set up at first use must not be captured. The pass
        # writes the same keys and values every time, so that running it again does no harm.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work(batch)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = work(batch)
        # Graphs never run at the same time, so that they can share their memory.
        self._pool = self._pool or graph.pool()

        def replay() -> tuple[Tensor, ...]:
            graph.replay()
            return out

        return replay

    def _drafts(self, batch: Batch, steps: int, vocab_size: int, cache: KVCache) -> tuple[Tensor, ...]:
        """Hidden states and entropies of the first pass; logits and entropies [(1 + steps) * rows, ...]
        behind its last tokens and behind each drafted one; those tokens [steps, rows]."""
        fed = batch.fed
        rows, tokens = fed.tokens.shape
        ends = torch.arange(rows, device=self.device) * tokens + batch.last
        positions = fed.positions.reshape(-1)[ends][:, None]
        hidden, entropy = self._pass(fed, cache)
        logits, entropies, drafted = [self._logits(hidden[ends])], [entropy[ends]], []
        for _ in range(steps):
            positions = positions + 1
            drafted.append(logits[-1][:, :vocab_size].argmax(-1))
            step = Fed(
                tokens=drafted[-1][:, None],
                positions=positions,
                blocks=fed.table.gather(1, positions // cache.block_size),
                offsets=positions % cache.block_size,
                table=fed.table,
            )
            behind, spread = self._pass(step, cache)
            logits.append(self._logits(behind))
            entropies.append(spread)
        return hidden, entropy, torch.cat(logits), torch.cat(entropies), torch.stack(drafted)

    def _pass(self, fed: Fed, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Hidden states [rows * tokens, hidden] before the last norm, and the last layer's attention entropy
        [rows * tokens]; nothing in it waits for the host."""
        h = self._embed(fed.tokens.reshape(-1))
        cos, sin = self._rotation(h, fed.positions.reshape(-1))
        mask = self._bias(fed, cache)
        to = (fed.blocks.reshape(-1), fed.offsets.reshape(-1))
        entropy = h
        for i, layer in enumerate(self.layers):
            q = self._project(i, layer, self._rms_norm(h, layer.input_norm), cos, sin, *to, cache)
            q = self._by_kv_head(q, fed)
            keys, values = (self._pages(store[i], fed) for store in (cache.keys, cache.values))
            attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
            h = self._feed_forward(layer, h + F.linear(self._by_token(attended, fed), layer.out))
            if i == len(self.layers) - 1:
                entropy = self._entropy(q, keys, mask, fed)
        return h, entropy

    def _by_kv_head(self, q: Tensor, fed: Fed) -> Tensor:
        """[rows * tokens, heads, dim] -> [rows, KV heads, heads of one * tokens, dim]."""
        rows, tokens = fed.tokens.shape
        q = q.view(rows, tokens, self.num_kv_heads, -1, self.head_dim).permute(0, 2, 3, 1, 4)
        return q.reshape(rows, self.num_kv_heads, -1, self.head_dim)

    def _by_token(self, attended: Tensor, fed: Fed) -> Tensor:
        """The way back, heads side by side: [rows * tokens, heads * dim]."""
        rows, tokens = fed.tokens.shape
        attended = attended.view(rows, self.num_kv_heads, -1, tokens, self.head_dim)
        return attended.permute(0, 3, 1, 2, 4).reshape(rows * tokens, -1)

    def _pages(self, store: Tensor, fed: Fed) -> Tensor:
        """Every row's blocks as one stretch: [rows, KV heads, pages * block size, dim]."""
        gathered = store[fed.table].transpose(1, 2)
        return gathered.reshape(len(fed.table), self.num_kv_heads, -1, self.head_dim)

    def _bias(self, fed: Fed, cache: KVCache) -> Tensor:
        """Additive mask [rows, 1, heads of one KV head * tokens, keys]: keys up to the query's own."""
        keys = torch.arange(fed.table.shape[1] * cache.block_size, device=self.device)
        hidden = keys > fed.positions[:, :, None]
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        mask = mask.masked_fill(hidden, float("-inf"))
        return mask[:, None].repeat(1, 1, self.num_heads // self.num_kv_heads, 1)

    def _entropy(self, q: Tensor, keys: Tensor, mask: Tensor, fed: Fed) -> Tensor:
        """Nats, mean over heads: [rows * tokens]."""
        rows, tokens = fed.tokens.shape
        scores = q @ keys.transpose(-1, -2) * self.head_dim**-0.5 + mask
        entropy: Tensor = torch.special.entr(torch.softmax(scores.float(), dim=-1)).sum(-1)
        return entropy.view(rows, self.num_heads, tokens).mean(1).reshape(-1)


def _bucket(feeds: Sequence[Feed], longest: int, steps: int, block_size: int) -> Bucket:
    """The smallest that holds the feeds and `steps` drafted tokens behind each."""
    end = max(feed.start + len(feed.tokens) for feed in feeds) + steps
    pages = 1 << (-(-end // block_size) - 1).bit_length()
    rows = next(num for num in ROWS if num >= len(feeds))
    return Bucket(rows, next(num for num in TOKENS if num >= longest), pages, steps)


def _wanted(feeds: Sequence[Feed], tokens: int) -> Iterator[int]:
    """Indices among rows * tokens whose logits are asked for."""
    for row, feed in enumerate(feeds):
        end = row * tokens + len(feed.tokens)
        yield from range(end - feed.num_logits, end)


def _exactly(num: int, blocks: Sequence[int], spare: int) -> list[int]:
    return [*blocks[:num], *repeat(spare, num - len(blocks))]

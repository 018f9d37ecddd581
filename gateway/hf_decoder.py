"""Any other causal decoder: Hugging Face's own forward, whose cache layers read and write our slots."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from gateway.cache import CacheShape, KVCache
from gateway.layout import Feed, Forward, Layout, Span

TOLERANCE = {torch.float32: 1e-3}
LOW_TOLERANCE = 0.1
"""Largest self-check difference of a logit, in standard deviations of the logits; the low one for 16 bits."""


class HFDecoder:
    """A Hugging Face model as it is. Rows that feed equally many tokens run as one batch, padded on the left
    as `generate` does, so that every family's positions and masks come out as its authors meant them.

    Attention entropy and hidden states are not measured. Raises ValueError, naming the reason, where keys and
    values are not one plain entry a token and layer, or where ragged rows and dropped drafts do not give the
    model's own logits.
    """

    num_spare_blocks = 0
    hidden_size = 0

    def __init__(self, hf: Any) -> None:
        self.hf = hf
        self.device: torch.device = hf.device
        self.max_positions: int | None = getattr(
            hf.config.get_text_config(decoder=True), "max_position_embeddings", None
        )
        known = inspect.signature(hf.forward).parameters
        if "cache" not in known:
            raise ValueError("its forward takes no cache of keys and values")
        self.options = known.keys() & {"position_ids", "logits_to_keep"}
        self.cache_shape, self.vocab_size = _probe(hf)
        _check_itself(self)

    def __call__(self, feeds: Sequence[Feed], cache: KVCache) -> Forward:
        """One pass, a batch for each number of tokens."""
        layout = Layout(feeds, cache.block_size, self.device)
        wanted = layout.wanted.tolist()
        logits = torch.empty(len(wanted), self.vocab_size, device=self.device)
        place = {flat: i for i, flat in enumerate(wanted)}
        batches: dict[int, list[Span]] = defaultdict(list)
        for span in layout.spans:
            batches[span.last - span.first].append(span)
        for num, spans in batches.items():
            asked = [(row, flat) for row, s in enumerate(spans) for flat in range(s.first, s.last)]
            asked = [(row, flat) for row, flat in asked if flat in place]
            keep = max((spans[row].last - flat for row, flat in asked), default=1)
            got = self._run(num, spans, keep, layout, cache)
            for row, flat in asked:
                logits[place[flat]] = got[row, flat - spans[row].last]
        return Forward(logits, None)

    def _run(self, num: int, spans: Sequence[Span], keep: int, layout: Layout, cache: KVCache) -> Tensor:
        """Logits [rows, at least keep, vocab] of rows that feed `num` tokens each."""
        flat = torch.cat([torch.arange(s.first, s.last, device=self.device) for s in spans])
        lengths = torch.tensor([s.length for s in spans], device=self.device)
        longest = max(s.length for s in spans)
        positions = torch.arange(longest, device=self.device)
        options = {"position_ids": layout.positions[flat].view(-1, num), "logits_to_keep": keep}
        logits: Tensor = self.hf(
            input_ids=layout.tokens[flat].view(-1, num),
            attention_mask=(positions >= longest - lengths[:, None]).long(),
            cache=Cache([_SlotLayer(cache, i, spans, layout, flat) for i in range(len(cache.keys))]),
            use_cache=True,
            **{name: value for name, value in options.items() if name in self.options},
        ).logits
        return logits.float()


class _SlotLayer(DynamicLayer):  # type: ignore[misc]
    """One layer of transformers' cache for one batch of rows: what it keeps is in our slots."""

    def __init__(
        self, cache: KVCache, layer: int, spans: Sequence[Span], layout: Layout, flat: Tensor
    ) -> None:
        super().__init__()
        self.cache = cache
        self.layer = layer
        self.spans = spans
        self.blocks, self.offsets = layout.blocks[flat], layout.offsets[flat]
        self.past = max(span.length for span in spans) - len(flat) // len(spans)

    def get_seq_length(self) -> int:
        """Positions before this pass, the longest row's."""
        return self.past

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store the new keys and values [rows, heads, new, dim]; all of the rows', padded on the left."""
        new = [states.transpose(1, 2).flatten(0, 1) for states in (key_states, value_states)]
        self.cache.write(self.layer, self.blocks, self.offsets, new[0], new[1])
        read = [self.cache.read(self.layer, span.blocks, span.length) for span in self.spans]
        keys, values = (self._padded([pair[i] for pair in read]) for i in (0, 1))
        return keys, values

    def _padded(self, rows: list[Tensor]) -> Tensor:
        if len(rows) == 1:
            return rows[0][None]
        longest = max(row.shape[1] for row in rows)
        # Zeros, not whatever is in memory: a masked NaN would still spoil the weighted sum.
        out = rows[0].new_zeros(len(rows), rows[0].shape[0], longest, rows[0].shape[2])
        for i, row in enumerate(rows):
            out[i, :, longest - row.shape[1] :] = row
        return out


@torch.inference_mode()
def _probe(hf: Any) -> tuple[CacheShape, int]:
    """What a position costs and how wide the logits are, by asking the model."""
    cache = DynamicCache(config=hf.config)
    logits = hf(input_ids=torch.tensor([[0, 1]], device=hf.device), cache=cache, use_cache=True).logits
    for i, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer:
            raise ValueError(
                f"layer {i} keeps a {type(layer).__name__}: sliding-window, recurrent and hybrid layers "
                "cannot drop drafted tokens"
            )
    shapes = {(tuple(t.shape), t.dtype) for layer in cache.layers for t in (layer.keys, layer.values)}
    if len(shapes) != 1:
        raise ValueError(f"keys and values differ in shape: {sorted(shape for shape, _ in shapes)}")
    ((_, heads, num, dim), dtype) = shapes.pop()
    if num != 2:
        raise ValueError(f"two tokens leave {num} entries in its cache")
    return CacheShape(len(cache.layers), heads, dim, dtype), logits.shape[-1]


@torch.inference_mode()
def _check_itself(decoder: HFDecoder) -> None:
    """Ragged rows, a dropped draft and single steps against plain forwards; ValueError where they differ."""
    texts = [[(7 * i + 3 * row) % decoder.vocab_size for i in range(8)] for row in (1, 2)]
    wrong = [(token + 1) % decoder.vocab_size for token in texts[0][4:6]]
    cache = KVCache(decoder.cache_shape, 2, 8, decoder.device)
    got: dict[tuple[int, int], Tensor] = {}
    for feeds in (
        [Feed((0,), 0, texts[0][:4], 1), Feed((1,), 0, texts[1][:1], 1)],
        [Feed((0,), 4, wrong, 2), Feed((1,), 1, texts[1][1:3], 2)],
        [Feed((0,), 4, texts[0][4:7], 3), Feed((1,), 3, texts[1][3:7], 4)],
        [Feed((0,), 7, texts[0][7:], 1), Feed((1,), 7, texts[1][7:], 1)],
    ):
        logits = iter(decoder(feeds, cache).logits)
        for feed in feeds:
            end = feed.start + len(feed.tokens)
            got.update({(feed.blocks[0], p): next(logits) for p in range(end - feed.num_logits, end)})
    for (row, position), logits in got.items():
        plain = decoder.hf(input_ids=torch.tensor([texts[row][: position + 1]], device=decoder.device))
        expected = plain.logits[0, -1].float()
        allowed = TOLERANCE.get(decoder.cache_shape.dtype, LOW_TOLERANCE) * expected.std()
        off = (logits - expected).abs().max()
        if not off <= allowed:
            raise ValueError(
                f"its forward over cached rows is off by {off:.3g} in a logit (allowed {allowed:.3g}): "
                "not causal, or not one plain entry a token and layer"
            )

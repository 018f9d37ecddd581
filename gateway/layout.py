"""A pass as tensors: where each flat token of its rows stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Feed:
    """New tokens of one row, at positions start, start + 1, ...; logits are wanted at the last num_logits."""

    blocks: tuple[int, ...]
    start: int
    tokens: Sequence[int]
    num_logits: int


class Forward(NamedTuple):
    """What a pass gives at the wanted positions: logits float32 [wanted, vocab]; attn_entropy float32
    [wanted], nats: entropy of the last layer's attention, mean over heads; hidden [wanted, hidden]: the last
    layer's output behind the final norm, which the head reads. None where they are not measured."""

    logits: Tensor
    attn_entropy: Tensor | None
    hidden: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """One row's share of the flat tokens, and its length once they are in the cache."""

    first: int
    last: int
    blocks: tuple[int, ...]
    length: int


class Layout:
    """Flat tokens of all feeds: token, position, row, block and offset of each (int64 [tokens]).

    wanted: flat indices whose logits are asked for. spans: one a feed.
    """

    def __init__(self, feeds: Sequence[Feed], block_size: int, device: torch.device) -> None:
        tokens: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        rows: list[int] = []
        wanted: list[int] = []
        self.spans: list[Span] = []
        for row, feed in enumerate(feeds):
            first, n = len(tokens), len(feed.tokens)
            length = feed.start + n
            tokens.extend(feed.tokens)
            positions.extend(range(feed.start, length))
            blocks.extend(feed.blocks[p // block_size] for p in range(feed.start, length))
            rows.extend([row] * n)
            wanted.extend(range(first + n - feed.num_logits, first + n))
            self.spans.append(Span(first, first + n, feed.blocks, length))
        self.tokens, self.positions, self.blocks, self.rows, self.wanted = (
            torch.tensor(values, dtype=torch.int64, device=device)
            for values in (tokens, positions, blocks, rows, wanted)
        )
        self.offsets = self.positions % block_size

    def block_table(self) -> Tensor:
        """Blocks of each row, int64 [rows, most blocks of a row], padded with the row's first block."""
        most = max(len(span.blocks) for span in self.spans)
        padded = [span.blocks + span.blocks[:1] * (most - len(span.blocks)) for span in self.spans]
        return torch.tensor(padded, dtype=torch.int64, device=self.tokens.device)

"""Where keys and values live: blocks of positions, a table of blocks a row, one length a row.

Rolling back is lowering a length: what lies behind it is overwritten, never read.
On a CPU a block is a whole slot (`block_size` = the longest row), since memory that is not touched is not
mapped; on a GPU blocks are pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Dimensions of one model's keys (and values) at one position."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of all layers at one position."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVCache:
    """One model's keys and values; `keys[layer]` is [num_blocks, num_kv_heads, block_size, head_dim].

    num_spare: blocks behind those, for padding. With padding, what is masked is read too, and a masked NaN
    would still spoil a sum: so such a cache starts out as zeros, where others leave memory untouched.
    """

    def __init__(
        self,
        shape: CacheShape,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        *,
        num_spare: int = 0,
    ) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        dims = (num_blocks + num_spare, shape.num_kv_heads, block_size, shape.head_dim)
        make = torch.zeros if num_spare else torch.empty
        self.keys = [make(dims, dtype=shape.dtype, device=device) for _ in range(shape.num_layers)]
        self.values = [make(dims, dtype=shape.dtype, device=device) for _ in range(shape.num_layers)]

    def write(self, layer: int, blocks: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [tokens, num_kv_heads, head_dim] at (block, offset) of each token."""
        self.keys[layer][blocks, :, offsets] = k
        self.values[layer][blocks, :, offsets] = v

    def copy(self, source: tuple[int, ...], target: tuple[int, ...], length: int) -> None:
        """Copy the first `length` positions of the blocks `source` to the blocks `target`."""
        for start in range(0, length, self.block_size):
            a, b = source[start // self.block_size], target[start // self.block_size]
            num = min(self.block_size, length - start)
            for store in (*self.keys, *self.values):
                store[b, :, :num] = store[a, :, :num]

    def read(self, layer: int, blocks: tuple[int, ...], length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [num_kv_heads, length, head_dim] of one row; a view where one block holds it."""
        keys, values = self.keys[layer], self.values[layer]
        if length <= self.block_size:
            return keys[blocks[0], :, :length], values[blocks[0], :, :length]
        used = list(blocks[: -(-length // self.block_size)])
        return _gather(keys, used, length), _gather(values, used, length)


def _gather(store: Tensor, blocks: list[int], length: int) -> Tensor:
    picked = store[blocks].transpose(0, 1)
    return picked.reshape(picked.shape[0], -1, picked.shape[-1])[:, :length]


class BlockPool:
    """Free blocks, shared by all models: block b of a row is block b in every model's cache."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    def blocks_for(self, length: int) -> int:
        """Blocks that `length` positions take."""
        return -(-length // self.block_size)

    def can_allocate(self, length: int) -> bool:
        """Whether a row of `length` positions fits now."""
        return self.blocks_for(length) <= self.num_free

    def allocate(self, length: int) -> tuple[int, ...]:
        """Blocks for a row of `length` positions. Raises MemoryError when they are not free."""
        need = self.blocks_for(length)
        if need > self.num_free:
            raise MemoryError(f"{need} KV blocks wanted, {self.num_free} free")
        return tuple(self._free.pop() for _ in range(need))

    def release(self, blocks: tuple[int, ...]) -> None:
        """Give a row's blocks back."""
        self._free.extend(reversed(blocks))
        if len(self._free) > self.num_blocks:
            raise AssertionError("a KV block was released twice")


def num_blocks_for(budget_bytes: int, block_size: int, shapes: list[CacheShape], most: int) -> int:
    """Blocks that the memory budget holds across all models, at most `most`. Raises MemoryError below one."""
    per_block = block_size * sum(shape.bytes_per_token for shape in shapes)
    num = min(most, budget_bytes // per_block)
    if num < 1:
        need = per_block / 2**30
        raise MemoryError(
            f"engine.kv_memory_gib is too small: one slot of {block_size} tokens needs {need:.3f}"
        )
    return int(num)

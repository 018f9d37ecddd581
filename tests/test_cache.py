"""Blocks: none lost, none shared; keys and values come back as written, whatever the block size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gateway.cache import BlockPool, CacheShape, KVCache, num_blocks_for

SHAPE = CacheShape(num_layers=2, num_kv_heads=3, head_dim=4, dtype=torch.float32)


def test_bytes_per_token_counts_keys_and_values_of_all_layers() -> None:
    assert SHAPE.bytes_per_token == 2 * 2 * 3 * 4 * 4


def test_blocks_from_a_budget() -> None:
    half = CacheShape(num_layers=1, num_kv_heads=1, head_dim=2, dtype=torch.bfloat16)
    per_block = 16 * (SHAPE.bytes_per_token + half.bytes_per_token)
    assert num_blocks_for(5 * per_block + 1, 16, [SHAPE, half], most=99) == 5
    assert num_blocks_for(5 * per_block, 16, [SHAPE, half], most=3) == 3
    with pytest.raises(MemoryError, match="kv_memory_gib"):
        num_blocks_for(per_block - 1, 16, [SHAPE, half], most=3)


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 8, 64])
def test_what_is_written_is_read_back_whatever_the_block_size(block_size: int) -> None:
    length = 13
    pool = BlockPool(40, block_size)
    cache = KVCache(SHAPE, 40, block_size, torch.device("cpu"))
    other, row = pool.allocate(length), pool.allocate(length)
    for blocks, seed in ((other, 1), (row, 2)):
        k, v = torch.randn(2, length, 3, 4, generator=torch.Generator().manual_seed(seed))
        for part in (range(0, 6), range(6, length)):
            at = torch.tensor([blocks[p // block_size] for p in part])
            offsets = torch.tensor([p % block_size for p in part])
            cache.write(1, at, offsets, k[list(part)], v[list(part)])
    for read_length in (1, 5, 8, 13):
        keys, values = cache.read(1, row, read_length)
        assert torch.equal(k[:read_length].transpose(0, 1), keys)
        assert torch.equal(v[:read_length].transpose(0, 1), values)


@given(
    st.integers(1, 12),
    st.integers(1, 8),
    st.lists(
        st.one_of(
            st.tuples(st.just("admit"), st.integers(1, 30)), st.tuples(st.just("end"), st.integers(0, 9))
        )
    ),
)
def test_the_pool_neither_leaks_nor_lends_twice(num: int, size: int, played: list[tuple[str, int]]) -> None:
    pool = BlockPool(num, size)
    held: list[tuple[int, ...]] = []
    for kind, n in played:
        if kind == "end":
            if held:
                pool.release(held.pop(n % len(held)))
        elif pool.can_allocate(n):
            blocks = pool.allocate(n)
            assert len(blocks) * size >= n > (len(blocks) - 1) * size
            held.append(blocks)
        else:
            free = pool.num_free
            with pytest.raises(MemoryError):
                pool.allocate(n)
            assert pool.num_free == free
        lent = [b for blocks in held for b in blocks]
        assert len(set(lent)) == len(lent)
        assert set(lent) <= set(range(num))
        assert pool.num_free == num - len(lent)
    for blocks in held:
        pool.release(blocks)
    assert len(set(pool.allocate(num * size))) == num


def test_releasing_twice_is_a_bug_that_shows() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.allocate(4)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="twice"):
        pool.release(blocks)

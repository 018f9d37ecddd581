"""Kept prefixes: the longest of one's own scope, least recently used first out, no block lost."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.core import Tier
from gateway.prefix import LEAST_TOKENS, Kept, PrefixCache


def kept(scope: str, tokens: list[int], block: int) -> Kept:
    return Kept(scope, tuple(tokens), (block,), {Tier.SMALL: len(tokens), Tier.LARGE: len(tokens)})


SYSTEM = list(range(LEAST_TOKENS))


def test_the_longest_common_beginning_is_found() -> None:
    cache = PrefixCache(4)
    cache.keep(kept("", [*SYSTEM, 1, 2, 3], 0))
    cache.keep(kept("", [*SYSTEM, 1, 5, 6], 1))
    found = cache.find("", [*SYSTEM, 1, 2, 9], Tier.LARGE)
    assert found is not None
    assert (found[0].blocks, found[1]) == ((0,), LEAST_TOKENS + 2)


def test_another_scope_finds_nothing() -> None:
    cache = PrefixCache(4)
    cache.keep(kept("a", SYSTEM, 0))
    assert cache.find("b", SYSTEM, Tier.LARGE) is None


def test_short_beginnings_are_not_worth_it() -> None:
    cache = PrefixCache(4)
    assert cache.keep(kept("", SYSTEM[:-1], 0)) == [(0,)]
    cache.keep(kept("", SYSTEM, 1))
    assert cache.find("", [*SYSTEM[:-1], 99], Tier.LARGE) is None


def test_a_longer_row_replaces_its_own_beginning() -> None:
    cache = PrefixCache(4)
    cache.keep(kept("", SYSTEM, 0))
    assert cache.keep(kept("", [*SYSTEM, 1], 1)) == [(0,)]
    assert cache.keep(kept("other", [*SYSTEM, 1, 2], 2)) == []


def test_each_tier_finds_the_row_that_it_has_read_most_of() -> None:
    cache = PrefixCache(4)
    cache.keep(kept("", [*SYSTEM, 1], 0))
    cache.keep(Kept("", (*SYSTEM, 1, 2), (1,), {Tier.SMALL: 0, Tier.LARGE: LEAST_TOKENS + 2}))
    prompt = [*SYSTEM, 1, 2, 3]
    small, large = (cache.find("", prompt, tier) for tier in (Tier.SMALL, Tier.LARGE))
    assert small is not None
    assert large is not None
    assert (small[0].blocks, small[1]) == ((0,), LEAST_TOKENS + 1)
    assert (large[0].blocks, large[1]) == ((1,), LEAST_TOKENS + 2)


def test_least_recently_used_goes_first() -> None:
    cache = PrefixCache(2)
    cache.keep(kept("", [*SYSTEM, 1], 0))
    cache.keep(kept("", [*SYSTEM, 2], 1))
    cache.find("", [*SYSTEM, 1], Tier.LARGE)
    assert cache.keep(kept("", [*SYSTEM, 3], 2)) == [(1,)]


def test_a_beginning_that_all_have_keeps_no_row_from_going() -> None:
    cache = PrefixCache(2)
    cache.keep(kept("", [*SYSTEM, 1], 0))
    cache.keep(kept("", [*SYSTEM, 2], 1))
    found = cache.find("", [*SYSTEM, 9], Tier.LARGE)
    assert found is not None
    assert found[0].blocks == (1,)
    assert cache.keep(kept("", [*SYSTEM, 3], 2)) == [(0,)]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5), st.integers(0, 3)), max_size=40))
def test_every_block_is_held_or_released_exactly_once(rows: list[tuple[str, int, int]]) -> None:
    cache = PrefixCache(3)
    released: list[int] = []
    for block, (scope, kind, extra) in enumerate(rows):
        for blocks in cache.keep(kept(scope, [*SYSTEM, kind, *range(extra)], block)):
            released.extend(blocks)
    while len(cache):
        released.extend(cache.evict())
    assert sorted(released) == list(range(len(rows)))


@given(st.lists(st.integers(0, 2), max_size=80), st.lists(st.integers(0, 2), max_size=80))
def test_common_length_is_that_of_a_plain_loop(a: list[int], b: list[int]) -> None:
    cache = PrefixCache(1)
    cache.keep(kept("", [*SYSTEM, *a], 0))
    found = cache.find("", [*SYSTEM, *b], Tier.LARGE)
    plain = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert found is not None
    assert found[1] == LEAST_TOKENS + plain

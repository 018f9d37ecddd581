"""Rows that run together and begin alike: each common token is read once a model, and no answer changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from fakes import Gathered, ScriptedModel, ask_for, decode, decode_one, fake_engine, near, noise_logits
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core import Accept, FinishReason, Mode, Tier
from gateway.engine import Engine
from gateway.load import CostTable, Load
from gateway.policy import Level, Policy
from gateway.prefix import LEAST_TOKENS, PrefixCache
from gateway.request import Request

if TYPE_CHECKING:
    from tiny_pair import TinyPair

VOCAB = 8
# What they say hangs on the whole context: a wrong token anywhere in a copied prefix shows.
LARGE = noise_logits(1, VOCAB, memory=1000)
SMALL = near(LARGE, 2, 1.0)
MIDDLE = near(LARGE, 3, 0.5)

SYSTEM = [(i * i + i // 7) % 7 for i in range(40)]
LONG = [(i * i + i // 5) % 7 for i in range(150)]
ALONE = Policy(mode=Mode.LARGE_ONLY)


def engine(**options: object) -> Engine:
    sizes = {"max_model_len": 256, "block_size": 32, "num_blocks": 400, **options}
    return fake_engine(SMALL, LARGE, vocab_size=VOCAB, **sizes)


def model(e: Engine, tier: Tier) -> ScriptedModel:
    return e.tiers[tier].model


def num_prompt_fed(e: Engine, tier: Tier, num_prompt: int) -> int:
    """Tokens of prompts, all num_prompt long, that a tier's model was fed."""
    feeds = [feed for fed in model(e, tier).feeds for feed in fed]
    return sum(max(0, min(f.start + len(f.tokens), num_prompt) - f.start) for f in feeds)


def alone(requests: Sequence[Request]) -> dict[tuple[str, int], list[int]]:
    return {(r.id, r.choice): decode_one(engine(), r).tokens for r in requests}


def burst(num: int, **options: object) -> list[Request]:
    """Prompts of 43 tokens that begin with SYSTEM and go on differently from there."""
    return [ask_for(f"r{i}", [*SYSTEM, i, 1, 2], **{"policy": ALONE, **options}) for i in range(num)]


@pytest.mark.parametrize("max_tokens", [1, 12])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_burst_reads_its_common_beginning_once(max_tokens: int, temperature: float) -> None:
    """An answer of one token is over with the pass that reads the prompt: the others have it all the same."""
    requests = burst(5, max_tokens=max_tokens, temperature=temperature, seed=3)
    e = engine()
    got = decode(e, requests)
    assert alone(requests) == {key: answer.tokens for key, answer in got.items()}
    assert [len(feed.tokens) for feed in model(e, Tier.LARGE).feeds[0]] == [43]
    assert num_prompt_fed(e, Tier.LARGE, 43) == 43 + 4 * 3


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_choices_of_one_request_read_only_their_last_prompt_token(temperature: float) -> None:
    requests = [ask_for("n", SYSTEM, choice=c, temperature=temperature, max_tokens=12) for c in range(8)]
    e = engine()
    got = decode(e, requests)
    assert alone(requests) == {key: answer.tokens for key, answer in got.items()}
    for tier in (Tier.SMALL, Tier.LARGE):
        assert num_prompt_fed(e, tier, 40) == 40 + 7


def test_prompts_that_differ_in_their_last_token() -> None:
    requests = [ask_for(f"r{i}", [*SYSTEM[:-1], i], policy=ALONE) for i in range(2)]
    e = engine()
    got = decode(e, requests)
    assert alone(requests) == {key: answer.tokens for key, answer in got.items()}
    assert num_prompt_fed(e, Tier.LARGE, 40) == 40 + 1


@pytest.mark.parametrize(("num", "fed"), [(LEAST_TOKENS - 1, 2 * 11), (LEAST_TOKENS, 11 + 3)])
def test_only_a_beginning_that_is_worth_a_copy_is_waited_for(num: int, fed: int) -> None:
    requests = [ask_for(f"r{i}", [*SYSTEM[:num], *[i] * (11 - num)], policy=ALONE) for i in range(2)]
    e = engine()
    decode(e, requests)
    assert num_prompt_fed(e, Tier.LARGE, 11) == fed


def test_another_keys_rows_neither_wait_nor_copy() -> None:
    mine, theirs = burst(2)
    e = engine()
    decode(e, [mine, replace(theirs, scope="another key")])
    assert [len(feed.tokens) for feed in model(e, Tier.LARGE).feeds[0]] == [43, 43]


def test_a_row_that_comes_later_copies_from_one_that_writes_already() -> None:
    first, second = burst(2, max_tokens=30)
    e = engine()
    e.add(first)
    for _ in range(5):
        e.tick()
    e.add(second)
    e.tick()
    assert [(feed.start, len(feed.tokens)) for feed in model(e, Tier.LARGE).feeds[-1]] == [(47, 1), (40, 3)]


def test_a_beginning_longer_than_a_chunk_is_followed_to_its_end() -> None:
    """200 tokens, 150 of them in common, 64 a pass: the first reads three times, then the other goes on."""
    requests = [ask_for(f"r{i}", [*LONG, *[i] * 50], policy=ALONE) for i in range(2)]
    e = engine(prefill_chunk=64)
    got = decode(e, requests)
    assert alone(requests) == {key: answer.tokens for key, answer in got.items()}
    fed = [[(feed.start, len(feed.tokens)) for feed in feeds] for feeds in model(e, Tier.LARGE).feeds]
    assert fed[:3] == [[(0, 64)], [(64, 64)], [(128, 64)]]
    assert sorted(fed[3]) == [(150, 50), (192, 8)]


def test_each_tier_is_followed_for_itself() -> None:
    """The first row never runs the small model: nobody waits for it there."""
    first, *others = burst(3)
    routed = [replace(r, policy=Policy(protect_first=1, lookup=False)) for r in others]
    e = engine()
    got = decode(e, [first, *routed])
    assert alone([first, *routed]) == {key: answer.tokens for key, answer in got.items()}
    assert num_prompt_fed(e, Tier.LARGE, 43) == num_prompt_fed(e, Tier.SMALL, 43) + 3 == 43 + 2 * 3


def test_a_row_that_owes_views_of_its_prompt_reads_all_of_it_and_others_follow_it() -> None:
    first, second, third = burst(3)
    e = engine()
    decode(e, [replace(first, prompt_logprobs=True), second, replace(third, prompt_logprobs=True)])
    fed = [sorted(len(feed.tokens) for feed in feeds) for feeds in model(e, Tier.LARGE).feeds]
    assert fed[:2] == [[43, 43], [1, 1, 3]]


@pytest.mark.parametrize("kept", [0, 4])
def test_a_leader_that_is_cancelled_leaves_what_it_has_read(kept: int) -> None:
    requests = [ask_for(f"r{i}", [*LONG, *[i] * 50], policy=ALONE) for i in range(3)]
    e, got = engine(prefill_chunk=64, prefixes=PrefixCache(kept)), Gathered()
    for request in requests:
        e.add(request)
    got.take(e.tick())
    assert [row.seen[Tier.LARGE] for row in e.rows] == [64, 0, 0]
    got.take(e.cancel("r0"))
    while not e.idle:
        got.take(e.tick())
    expected = alone(requests)
    assert all(got[r.id, 0].tokens == expected[r.id, 0] for r in requests[1:])
    # The second goes on from there and leads the third.
    assert num_prompt_fed(e, Tier.LARGE, 200) == 64 + 136 + 50


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    """They share 40 tokens; the long one is read 64 tokens a pass, and the short one in the first of them."""
    long, short = ask_for("long", LONG, policy=ALONE), ask_for("short", [*LONG[:40], 7, 7], policy=ALONE)
    e = engine(prefill_chunk=64)
    got = decode(e, [long, short])
    assert alone([long, short]) == {key: answer.tokens for key, answer in got.items()}
    fed = [[(feed.start, len(feed.tokens)) for feed in feeds] for feeds in model(e, Tier.LARGE).feeds]
    assert sorted(fed[0]) == [(0, 42), (0, 64)]


def test_a_leader_that_fails_takes_no_follower_with_it() -> None:
    requests = burst(3)
    e, got = engine(), Gathered()
    for request in requests:
        e.add(request)
    model(e, Tier.LARGE).error = RuntimeError("out of memory")
    got.take(e.tick())
    model(e, Tier.LARGE).error = None
    while not e.idle:
        got.take(e.tick())
    assert got["r0", 0].finished.reason is FinishReason.ERROR
    expected = alone(requests)
    assert all(got[r.id, 0].tokens == expected[r.id, 0] for r in requests[1:])
    assert e.pool.num_free == e.pool.num_blocks


@pytest.mark.parametrize(
    ("ms", "num_rows", "first_pass"),
    [
        # Up to 128 tokens a pass takes the same: two rows read 40 common tokens in one, four (160) do not.
        ((10.0, 10.0, 100.0), 2, 2),
        ((10.0, 10.0, 100.0), 4, 1),
        ((10.0, 100.0, 1000.0), 2, 1),
    ],
)
def test_rows_wait_where_that_takes_less_than_reading(
    ms: tuple[float, ...], num_rows: int, first_pass: int
) -> None:
    load = Load(dict.fromkeys((Tier.SMALL, Tier.LARGE), CostTable((1, 128, 256), ms)))
    e = engine(load=load)
    for request in burst(num_rows):
        e.add(request)
    e.tick()
    assert len(model(e, Tier.LARGE).feeds[0]) == first_pass


def test_real_models_give_the_same_answers_with_and_without_company(tiny_pair: TinyPair) -> None:
    text = b"You are a helpful assistant. Answer in one sentence. User: "
    requests = [
        ask_for(f"r{i}", [*text, *tail], policy=policy, max_tokens=12, temperature=temperature, seed=i)
        for i, (tail, policy, temperature) in enumerate(
            (tail, policy, temperature)
            for tail in (b"Why?", b"Why not?")
            for policy in (ALONE, Policy(protect_first=1), Policy(accept=Accept.TOKEN_V3, threshold=0.2))
            for temperature in (0.0, 1.0)
        )
    ]
    expected = {r.id: decode_one(tiny_pair.engine(), r).tokens for r in requests}
    e = tiny_pair.engine()
    fed: list[tuple[Tier, int]] = []
    for request in requests:
        e.add(request)
    got = Gathered()
    while not e.idle:
        tick = e.tick()
        got.take(tick)
        if tick.passed is not None:
            fed.append((tick.passed.tier, tick.passed.tokens))
    assert {r.id: got[r.id, 0].tokens for r in requests} == expected
    # Without sharing the large model alone would read 12 prompts of over 60 tokens.
    assert sum(num for tier, num in fed if tier is Tier.LARGE) < 12 * len(text)


# ---- any company

policies = st.builds(
    Policy,
    mode=st.sampled_from([Mode.ROUTED, Mode.ROUTED, Mode.LARGE_ONLY, Mode.SMALL_ONLY, Mode.SHADOW]),
    accept=st.sampled_from([Accept.EXACT, Accept.TOKEN_V3, Accept.TRUST]),
    threshold=st.sampled_from([0.0, 0.4, 1.0]),
    draft_length=st.integers(1, 6),
    protect_first=st.integers(0, 3),
    lookup=st.booleans(),
    middle=st.just(Level(0.4, 4)),
)

requests_of_any_kind = st.builds(
    lambda opening, num, tail, **options: ask_for(
        "r", [*LONG[:num], *([opening] * opening), *tail], **options
    ),
    opening=st.integers(0, 2),
    num=st.sampled_from([0, 7, 12, 40, 100]),
    tail=st.lists(st.integers(0, 1), min_size=1, max_size=30),
    policy=policies,
    max_tokens=st.integers(1, 12),
    temperature=st.sampled_from([0.0, 1.0]),
)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(
            requests_of_any_kind,
            st.integers(1, 3),  # choices
            st.integers(0, 12),  # the tick it comes with
            st.one_of(st.none(), st.integers(0, 15)),  # ticks until it is cancelled
            st.sampled_from(["", "a"]),
            st.booleans(),  # prompt_logprobs
            st.booleans(),  # audited
        ),
        min_size=1,
        max_size=6,
    ),
    st.booleans(),
    st.sampled_from([16, 65, 512]),
    st.sampled_from([8, 256]),
    st.sampled_from([0, 3]),
    st.integers(2, 20),
)
def test_no_answer_depends_on_whose_beginning_was_copied(
    arrivals: list, three: bool, chunk: int, block_size: int, kept: int, max_rows: int
) -> None:
    options = {"middles": [MIDDLE] if three else []}
    asked = [
        (replace(r, id=f"r{i}", scope=scope, prompt_logprobs=logprobs, audited=audited), num, comes, leaves)
        for i, (r, num, comes, leaves, scope, logprobs, audited) in enumerate(arrivals)
    ]
    e = engine(
        **options,
        prefill_chunk=chunk,
        block_size=block_size,
        num_blocks=60 * 256 // block_size,
        max_rows=max_rows,
        prefixes=PrefixCache(kept),
    )
    got, tick = Gathered(), 0
    while tick <= 30 or not e.idle:
        for request, num, comes, leaves in asked:
            if tick == comes:
                for choice in range(num):
                    e.add(replace(request, choice=choice))
            if leaves is not None and tick == comes + leaves:
                got.take(e.cancel(request.id))
        assert e.idle or e.runnable
        got.take(e.tick())
        tick += 1
        assert tick < 3000, "somebody waits for ever"
    assert e.pool.num_free + e.prefixes.num_blocks == e.pool.num_blocks
    for request, num, _, leaves in asked:
        for choice in range(num):
            answer = got[request.id, choice]
            expected = decode_one(engine(**options), replace(request, choice=choice)).tokens
            assert answer.tokens == (expected if leaves is None else expected[: len(answer.tokens)])

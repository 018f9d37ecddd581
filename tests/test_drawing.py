"""Drawn tokens: noise against its law, distributions against transformers' own, few tokens against all."""

from __future__ import annotations

import math

import numpy as np
import plain_draws
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plain_draws import log_distribution
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from gateway import drawing
from gateway.core import Sampling
from gateway.drawing import GROUP, MOST_NOISE, Draw, Drawn, above, above_on_device, draw

VOCAB = 50


def logits(seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return 3 * torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed))


def sampling(**fields: object) -> Sampling:
    return Sampling(**{"max_tokens": 8, "seed": 5, "temperature": 1.0, **fields})


def to_draw(
    given: torch.Tensor,
    asked: Sampling,
    draft: int | None = None,
    *,
    row: int = 0,
    choice: int = 0,
    position: int = 0,
) -> Draw:
    """Row `row` of these logits, as a pass' numbers say it."""
    x = given[row]
    return Draw(row, asked, choice, position, int(x.argmax()), float(x.max()), draft, float(x[draft or 0]))


# ---- the noise


def gumbel(seed: int, choice: int, position: int, tokens: torch.Tensor) -> torch.Tensor:
    keys = np.full(len(tokens), drawing.noise_key(seed, choice, position), np.uint64)
    return torch.from_numpy(drawing.gumbel(drawing.uniform_bits(keys, tokens.numpy())))


def ks(values: list[float], cdf) -> float:
    """Kolmogorov-Smirnov statistic times sqrt(n); above 2.7 has probability < 1e-6."""
    n = len(values)
    gap = max(max(abs((i + 1) / n - cdf(v)), abs(i / n - cdf(v))) for i, v in enumerate(sorted(values)))
    return gap * math.sqrt(n)


def noise(seed: int = 1, choice: int = 0, position: int = 0, num: int = 4000) -> torch.Tensor:
    return gumbel(seed, choice, position, torch.arange(num))


def test_noise_over_tokens_is_standard_gumbel() -> None:
    assert ks(noise().tolist(), lambda x: math.exp(-math.exp(-x))) < 2.7


@pytest.mark.parametrize("axis", ["seed", "choice", "position"])
def test_noise_of_one_token_along_each_counter_is_standard_gumbel(axis: str) -> None:
    values = [
        float(gumbel(**{"seed": 3, "choice": 0, "position": 2, axis: i}, tokens=torch.tensor([17])))
        for i in range(2000)
    ]
    assert ks(values, lambda x: math.exp(-math.exp(-x))) < 2.7


@pytest.mark.parametrize("other", [{"seed": 2}, {"choice": 1}, {"position": 1}, {"seed": 1 + 2**32}])
def test_noise_of_different_counters_is_uncorrelated(other: dict[str, int]) -> None:
    """Correlation of n = 4000 independent pairs exceeds 5/sqrt(n) = 0.079 with probability < 1e-6."""
    rows = torch.stack([noise(), noise(**other)])
    assert abs(float(torch.corrcoef(rows)[0, 1])) < 0.079


def test_noise_of_neighbouring_tokens_is_uncorrelated() -> None:
    for lag in (1, 2, 64, 256):
        values = noise()
        rows = torch.stack([values[:-lag], values[lag:]])
        assert abs(float(torch.corrcoef(rows)[0, 1])) < 0.079


def test_noise_is_a_function_of_its_arguments_alone() -> None:
    some = torch.tensor([3, 99, 151_000])
    assert torch.equal(gumbel(9, 1, 4, torch.arange(151_001))[some], gumbel(9, 1, 4, some))


def test_noise_is_what_it_was() -> None:
    """Seeds in recorded traces must keep meaning the same tokens; computed once in plain integers."""
    import hashlib

    key = int.from_bytes(hashlib.blake2b(b"7:1:3", digest_size=8).digest(), "little")

    def mix(h: int) -> int:
        h ^= h >> 16
        h = h * 0x85EBCA6B % 2**32
        h ^= h >> 13
        h = h * 0xC2B2AE35 % 2**32
        return h ^ h >> 16

    def expected(token: int) -> float:
        h = mix((mix(token ^ key % 2**32) + (key >> 32)) % 2**32)
        return -math.log(-math.log(((h >> 8) + 0.5) / 2**24))

    tokens = [0, 1, 258, 151_935]
    assert gumbel(7, 1, 3, torch.tensor(tokens)).tolist() == pytest.approx([expected(t) for t in tokens])


def test_most_noise_is_the_largest_of_24_bit_uniforms() -> None:
    high = -math.log(-math.log((2**24 - 0.5) / 2**24))
    assert high < MOST_NOISE < high + 0.01


# ---- few tokens for all


FILTERS = {
    "temperature": st.floats(0.05, 4),
    "top_k": st.sampled_from([0, 1, 3, 20, VOCAB, 10_000]),
    "top_p": st.one_of(st.just(1.0), st.floats(0.01, 0.999999)),
    "min_p": st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
}


@given(st.fixed_dictionaries(FILTERS), st.integers(0, 2**63), st.integers(0, 9), st.floats(0.1, 30))
@example({"temperature": 0.5, "top_k": 0, "top_p": 0.999999, "min_p": 0.0}, 0, 0, 1.0)
@settings(max_examples=150, deadline=None)
def test_the_drawn_token_is_what_all_tokens_would_draw_and_allowed_is_what_p_allows(
    fields: dict[str, float], seed: int, position: int, spread: float
) -> None:
    given, asked = spread * logits(seed % 1000), sampling(**fields, seed=seed)
    given[0, seed % VOCAB] = -math.inf
    got = draw(given, [to_draw(given, asked, t, choice=1, position=position) for t in range(VOCAB)])
    assert {g.token for g in got} == {plain_draws.drawn(given[0], asked, 1, position)}
    assert [g.allowed for g in got] == (log_distribution(given[0], asked) > -math.inf).tolist()


@pytest.mark.parametrize(
    "fields", [{"top_k": 3}, {"top_p": 0.61}, {"top_p": 0.01}, {"min_p": 0.3}, {"top_k": 5, "top_p": 0.37}]
)
def test_equal_logits_are_kept_or_cut_as_the_order_of_ids_says(fields: dict[str, float]) -> None:
    for seed in range(20):
        given, asked = logits(seed).div(2).round(), sampling(**fields, seed=seed)
        got = draw(given, [to_draw(given, asked, t) for t in range(VOCAB)])
        assert {g.token for g in got} == {plain_draws.drawn(given[0], asked, 0, 0)}
        assert [g.allowed for g in got] == (log_distribution(given[0], asked) > -math.inf).tolist()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_mass_that_is_not_looked_at_counts_where_it_decides(temperature: float) -> None:
    """Tokens too unlikely to be drawn hold so much together that they move the end of the nucleus."""
    given = torch.full((1, 150_000), -18.0 * temperature)
    given[0, :3] = torch.tensor([0.5, 0.3, 0.2]).log() * temperature
    rest = (150_000 - 3) * math.exp(-18)
    for top_p, kept in ((0.8 / (1 + rest) * 1.0001, 3), (0.8 / (1 + rest) * 0.9999, 2)):
        asked = sampling(top_p=top_p, temperature=temperature)
        assert kept == int((log_distribution(given[0], asked) > -math.inf).sum())
        got = draw(given, [to_draw(given, asked, t, position=p) for p in range(30) for t in range(4)])
        assert [g.allowed for g in got] == [t < kept for _ in range(30) for t in range(4)]
        assert {g.token for g in got} == set(range(kept))


def test_a_draft_too_unlikely_to_be_drawn_is_allowed_where_p_allows_it() -> None:
    given = torch.full((1, VOCAB), -40.0)
    given[0, :5] = torch.tensor([0.0, -1.0, -2.0, -30.0, -31.0])
    for fields, kept in (
        ({}, 50),
        ({"top_k": 4}, 4),
        ({"top_k": 4, "top_p": 0.999999}, 3),
        ({"min_p": 5e-14}, 4),
    ):
        got = draw(given, [to_draw(given, sampling(**fields), t) for t in (0, 3, 4, 9)])
        assert [g.allowed for g in got] == [t < kept for t in (0, 3, 4, 9)]


def test_what_has_no_probability_is_never_drawn() -> None:
    given = torch.full((1, VOCAB), -math.inf)
    given[0, 41] = 2.0
    got = draw(given, [to_draw(given, sampling(seed=seed), 40) for seed in range(50)])
    assert set(got) == {Drawn(41, False)}


def test_logits_that_are_not_numbers_are_an_error_that_says_so() -> None:
    given = logits(0)
    good = to_draw(given, sampling())
    with pytest.raises(ValueError, match="logits of row 0 are not numbers"):
        draw(torch.full_like(given, math.nan), [good._replace(top=math.nan)])


def test_of_a_wide_vocabulary_few_tokens_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    def watched(*given: object) -> tuple:
        found = above(*given)
        counts.extend(found[0].tolist())
        return found

    monkeypatch.setattr(drawing, "above", watched)
    given = 6 * logits(3, 150_000)
    draw(given, [to_draw(given, sampling())])
    [count] = counts
    noise_of_best = float(gumbel(5, 0, 0, given[0].argmax()[None]))
    needed = float(given.max()) + noise_of_best - MOST_NOISE
    assert int((given[0].double() > needed).sum()) <= count < 1000


# ---- many rows


MIXED = [
    {},
    {"temperature": 0.3},
    {"temperature": 1.7},
    {"top_p": 0.95},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    {"top_k": 7},
    {"min_p": 0.05},
    {"temperature": 1.3, "top_p": 0.999999, "min_p": 0.001},
]


@pytest.mark.parametrize("vocab", [VOCAB, 3001])
def test_a_row_is_drawn_the_same_alone_and_among_others(vocab: int) -> None:
    num = 2 * GROUP + 3
    given = torch.cat([(0.3 + i % 5) * logits(i, vocab) for i in range(num)])
    draws = [
        to_draw(
            given, sampling(**MIXED[i % len(MIXED)], seed=i), (7 * i) % vocab, row=i, choice=i % 3, position=i
        )
        for i in range(num)
    ]
    alone = [draw(given[i : i + 1], [d._replace(row=0)])[0] for i, d in enumerate(draws)]
    assert alone == draw(given, draws)
    assert alone[::-2] == draw(given, draws[::-2])
    assert [a.token for a in alone] == [
        plain_draws.drawn(given[d.row], d.sampling, d.choice, d.position) for d in draws
    ]


def test_a_tokens_noise_has_the_same_bits_wherever_it_stands() -> None:
    bits = np.arange(5, 2**24, 40_009, dtype=np.uint32)
    together = drawing.gumbel(bits)
    for first in (1, 2, 3, 5):
        assert drawing.gumbel(bits[first::7]).tobytes() == together[first::7].tobytes()
    assert b"".join(drawing.gumbel(bits[i : i + 1]).tobytes() for i in range(len(bits))) == together.tobytes()


def test_devices_and_the_host_find_the_same_tokens() -> None:
    given = torch.cat([logits(i, 1000) for i in range(4)])[:, :900]
    given[0, 3] = -math.inf
    rows, bounds = [3, 0, 2], np.array([1.0, 100.0, -math.inf], np.float32)
    counts, tokens, values = above(given, rows, bounds)
    assert counts.tolist() == [int((given[3] > 1).sum()), 0, 900]
    assert tokens.tolist() == [*torch.nonzero(given[3] > 1)[:, 0].tolist(), *range(900)]
    assert values.tolist() == torch.cat([given[3][given[3] > 1], given[2]]).tolist()
    for one, other in zip((counts, tokens, values), above_on_device(given, rows, bounds), strict=True):
        assert one.tolist() == other.tolist()


# ---- the distribution p that all this is held against


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("fields", "warpers"),
    [
        ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
        ({"top_k": 5}, [TopKLogitsWarper(5)]),
        ({"top_k": 500}, [TopKLogitsWarper(500)]),
        ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
        ({"top_p": 0.01}, [TopPLogitsWarper(0.01)]),
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        (
            {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
            [
                TemperatureLogitsWarper(1.4),
                TopKLogitsWarper(20),
                TopPLogitsWarper(0.9),
                MinPLogitsWarper(0.05),
            ],
        ),
    ],
)
def test_distribution_is_that_of_transformers_warpers(seed: int, fields: dict, warpers: list) -> None:
    given = logits(seed)
    expected = given.double()
    for warper in warpers:
        expected = warper(None, expected)
    got = log_distribution(given[0], sampling(**fields))
    torch.testing.assert_close(got.exp(), torch.softmax(expected[0], dim=-1))
    assert torch.equal(got.isinf(), expected[0].isinf())


def test_top_p_keeps_the_token_that_crosses_the_bound() -> None:
    p = torch.tensor([0.5, 0.3, 0.2]).log()
    assert log_distribution(p, sampling(top_p=0.6)).isinf().tolist() == [False, False, True]
    assert log_distribution(p, sampling(top_p=0.0)).isinf().tolist() == [False, True, True]

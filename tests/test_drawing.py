"""Drawn tokens: noise against its law, distributions against transformers' own, few tokens against all."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from gateway.core import Sampling
from gateway.drawing import NOISE_RANGE, Chances, gumbel, log_distribution

VOCAB = 50


def logits(seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return 3 * torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed))


def sampling(**fields: object) -> Sampling:
    return Sampling(**{"max_tokens": 8, "seed": 5, "temperature": 1.0, **fields})


# ---- the noise


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


def test_noise_range_covers_the_extremes_of_24_bit_uniforms() -> None:
    low, high = (-math.log(-math.log((k + 0.5) / 2**24)) for k in (0, 2**24 - 1))
    assert high - low < NOISE_RANGE < high - low + 0.1


# ---- few tokens for all


FILTERS = {
    "temperature": st.floats(0.05, 4),
    "top_k": st.sampled_from([0, 1, 3, 20, VOCAB, 10_000]),
    "top_p": st.one_of(st.just(1.0), st.floats(0.01, 0.999999)),
    "min_p": st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
}


@given(st.fixed_dictionaries(FILTERS), st.integers(0, 2**63), st.integers(0, 9), st.floats(0.1, 30))
@example({"temperature": 0.5, "top_k": 0, "top_p": 0.999999, "min_p": 0.0}, 0, 0, 1.0)
@settings(max_examples=150)
def test_chances_draw_what_all_tokens_would_and_allow_what_p_does(
    fields: dict[str, float], seed: int, position: int, spread: float
) -> None:
    given, asked = spread * logits(seed % 1000)[0], sampling(**fields)
    given[seed % VOCAB] = -math.inf
    log_p = log_distribution(given, asked)
    chances = Chances.of(given, asked, float(given.max()))
    everywhere = log_p + gumbel(seed, 1, position, torch.arange(VOCAB))
    assert chances.draw(seed, 1, position) == int(everywhere.argmax())
    allowed = [chances.allow(token, given, asked) for token in range(VOCAB)]
    assert allowed == (log_p > -math.inf).tolist()


def test_what_has_no_probability_is_never_drawn() -> None:
    given = torch.full((VOCAB,), -math.inf)
    given[41] = 2.0
    assert {41} == {Chances.of(given, sampling(), 2.0).draw(seed, 0, 0) for seed in range(50)}


def test_of_a_wide_vocabulary_few_tokens_are_looked_at() -> None:
    given = 6 * logits(3, 150_000)[0]
    chances = Chances.of(given, sampling(), float(given.max()))
    assert len(chances.tokens) == int((given.double() > float(given.max()) - NOISE_RANGE).sum()) < 1000


# ---- the distribution p


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

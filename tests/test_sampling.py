"""Readings of logits: processors against transformers' own and OpenAI's formulas, noise against its law."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from gateway.core import Sampling
from gateway.sampling import NOISE_RANGE, Ask, draw, gumbel, log_distribution, read, shape, uniform

VOCAB = 50


def logits(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def ask(**fields: object) -> Ask:
    sampling_fields = {f: fields.pop(f) for f in list(fields) if f in Sampling.__dataclass_fields__}
    sampling = Sampling(**{"max_tokens": 8, "seed": 5, "temperature": 1.0, **sampling_fields})
    given = {"choice": 0, "position": 0, "prompt": (), "output": (), "num_topk": 3}
    return Ask(sampling=sampling, **{**given, **fields})


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


@given(st.integers(0, 2**63), st.integers(0, 3), st.integers(0, 9), st.floats(0.1, 30))
@settings(max_examples=150)
def test_drawing_over_candidates_is_drawing_over_all_tokens(
    seed: int, choice: int, position: int, spread: float
) -> None:
    log_p = torch.log_softmax(spread * logits(seed % 1000)[0].double(), dim=-1)
    everywhere = log_p + gumbel(seed, choice, position, torch.arange(VOCAB))
    assert draw(log_p, seed, choice, position) == int(everywhere.argmax())


def test_a_draw_never_takes_what_has_no_probability() -> None:
    log_p = torch.full((VOCAB,), -math.inf, dtype=torch.float64)
    log_p[41] = 0.0
    assert {41} == {draw(log_p, seed, 0, 0) for seed in range(50)}


def test_uniform_is_uniform_and_a_float32() -> None:
    values = [uniform(f"probe:{i}") for i in range(3000)]
    assert ks(values, lambda x: x) < 2.7
    assert torch.tensor(values, dtype=torch.float32).double().tolist() == values


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
    got = log_distribution(given[0], ask(**fields).sampling)
    torch.testing.assert_close(got.exp(), torch.softmax(expected[0], dim=-1))
    assert torch.equal(got.isinf(), expected[0].isinf())


def test_top_p_keeps_the_token_that_crosses_the_bound() -> None:
    p = torch.tensor([0.5, 0.3, 0.2]).log()
    assert log_distribution(p, ask(top_p=0.6).sampling).isinf().tolist() == [False, False, True]
    assert log_distribution(p, ask(top_p=0.0).sampling).isinf().tolist() == [False, True, True]


# ---- A: penalties, bias, bans


@pytest.mark.parametrize("penalty", [0.7, 1.3])
def test_repetition_penalty_is_transformers_over_prompt_and_output(penalty: float) -> None:
    given, prompt, output = logits(3), (4, 9, 4), (11, 9)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([[*prompt, *output]]), given)
    got = shape(given[0], ask(repetition_penalty=penalty, prompt=prompt, output=output))
    torch.testing.assert_close(got, expected[0])


def test_small_penalty_comes_on_top_of_the_requests_own() -> None:
    given, seen = logits(3), (4, 9)
    expected = given
    for _ in range(2):
        expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([seen]), expected)
    got = shape(given[0], ask(repetition_penalty=1.3, small_penalty=1.3, prompt=seen))
    torch.testing.assert_close(got, expected[0])


def test_presence_and_frequency_penalties_are_openais_over_the_output() -> None:
    """mu[j] -> mu[j] - c[j] * frequency - (c[j] > 0) * presence (OpenAI's API guide)."""
    given, output = logits(4)[0], (7, 8, 7, 7)
    got = shape(given, ask(presence_penalty=0.5, frequency_penalty=0.25, prompt=(1, 2), output=output))
    expected = given.clone()
    expected[7] -= 0.5 + 3 * 0.25
    expected[8] -= 0.5 + 0.25
    torch.testing.assert_close(got, expected)


def test_bias_is_added_and_bans_are_final() -> None:
    given = logits(5)[0]
    got = shape(given, ask(logit_bias=((3, 2.5), (6, -100.0), (9, 100.0)), banned=(9,)))
    assert float(got[3]) == pytest.approx(float(given[3]) + 2.5)
    assert float(got[6]) == pytest.approx(float(given[6]) - 100)
    assert float(got[9]) == -math.inf


def test_shaping_leaves_the_given_logits_alone() -> None:
    given = logits(6)[0]
    before = given.clone()
    shape(given, ask(repetition_penalty=2.0, presence_penalty=1.0, prompt=(1,), output=(2,), banned=(3,)))
    assert torch.equal(before, given)


# ---- readings


def test_signals_are_of_the_plain_softmax_at_temperature_one() -> None:
    given = logits(7)
    p = sorted(torch.softmax(given[0].double(), dim=-1).tolist(), reverse=True)
    for temperature in (0.0, 0.3, 1.7):
        [got] = read(given.clone(), [ask(temperature=temperature, top_k=3)])
        assert got.signals.top1_p == pytest.approx(p[0], abs=1e-6)
        assert got.signals.gap == pytest.approx(p[0] - p[1], abs=1e-6)
        assert got.signals.entropy == pytest.approx(-sum(x * math.log(x) for x in p), abs=1e-5)
        assert got.topk.logprobs == pytest.approx([math.log(x) for x in p[:3]], abs=1e-5)
        assert all(
            torch.tensor(x, dtype=torch.float32).item() == x for x in (*got.topk.logprobs, got.signals.gap)
        )


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    given = torch.zeros(1, VOCAB)
    given[0, [31, 12, 40]] = 5.0
    assert read(given, [ask(temperature=0.0)])[0].token == 12


def test_sampled_token_is_the_gumbel_argmax_of_p() -> None:
    for position in range(20):
        given, question = logits(position), ask(top_p=0.9, temperature=0.8, position=position, choice=2)
        log_p = log_distribution(given[0], question.sampling)
        expected = int((log_p + gumbel(5, 2, position, torch.arange(VOCAB))).argmax())
        [got] = read(given.clone(), [question])
        assert expected == got.token
        assert got.p_token == pytest.approx(float(torch.softmax(given[0], -1)[expected]), abs=1e-6)


def test_a_drafts_probability_is_of_a_and_allowed_is_of_p() -> None:
    given = logits(8)
    order = given[0].argsort(descending=True).tolist()
    for temperature in (0.5, 1.0):
        for rank in (0, 1, 2, 9):
            [got] = read(given.clone(), [ask(top_k=2, temperature=temperature, draft=order[rank])])
            assert got.p_draft == pytest.approx(float(torch.softmax(given[0], -1)[order[rank]]), abs=1e-6)
            assert got.allowed is (rank < 2)
    [greedy] = read(given.clone(), [ask(temperature=0.0, draft=order[9])])
    assert greedy.allowed
    [banned] = read(given.clone(), [ask(temperature=0.0, draft=order[0], banned=(order[0],))])
    assert (banned.allowed, banned.p_draft) == (False, 0.0)


def test_rows_are_read_each_by_its_own_question() -> None:
    given = logits(9, rows=3)
    asks = [
        ask(temperature=0.0, num_topk=2),
        ask(repetition_penalty=1.5, prompt=(1, 2, 3), num_topk=5, position=4),
        ask(temperature=0.7, top_p=0.5, draft=6, num_topk=3),
    ]
    together = read(given.clone(), asks)
    alone = [read(given[i : i + 1].clone(), [a])[0] for i, a in enumerate(asks)]
    assert alone == together
    assert [len(r.topk.ids) for r in together] == [2, 5, 3]


def test_logits_born_in_inference_mode_can_be_shaped() -> None:
    """The models' logits are inference tensors; writing to them outside inference mode is refused."""
    with torch.inference_mode():
        given = logits(10)
    [got] = read(given, [ask(temperature=0.0, logit_bias=((13, 100.0),))])
    assert got.token == 13


def test_nothing_asked_nothing_read() -> None:
    assert read(torch.empty(0, VOCAB), []) == []


def test_plain_means_untouched() -> None:
    assert ask().plain
    for field in ({"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": -0.1}):
        assert not ask(**field).plain
    assert not replace(ask(), banned=(1,)).plain
    assert not replace(ask(), small_penalty=1.1).plain

"""Readings of logits: processors against transformers' own and OpenAI's formulas."""

from __future__ import annotations

import math
import struct

import plain_draws
import pytest
import torch
from fakes import look_and_read
from msgspec import structs
from transformers import (
    RepetitionPenaltyLogitsProcessor,
)

from gateway.core import Sampling
from gateway.sampling import Ask, shape, uniform

VOCAB = 50


def logits(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def ask(**fields: object) -> Ask:
    sampling_fields = {f: fields.pop(f) for f in list(fields) if f in Sampling.__dataclass_fields__}
    sampling = Sampling(**{"max_tokens": 8, "seed": 5, "temperature": 1.0, **sampling_fields})
    given = {"choice": 0, "position": 0, "prompt": (), "output": (), "num_topk": 3}
    return Ask(sampling=sampling, **{**given, **fields})


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
        [got] = look_and_read(given.clone(), [ask(temperature=temperature, top_k=3)])
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
    assert look_and_read(given, [ask(temperature=0.0)])[0].token == 12


def test_sampled_token_is_the_gumbel_argmax_of_p() -> None:
    for position in range(20):
        given, question = logits(position), ask(top_p=0.9, temperature=0.8, position=position, choice=2)
        expected = plain_draws.drawn(given[0], question.sampling, 2, position)
        [got] = look_and_read(given.clone(), [question])
        assert expected == got.token
        assert got.p_token == pytest.approx(float(torch.softmax(given[0], -1)[expected]), abs=1e-6)


def test_a_drafts_probability_is_of_a_and_allowed_is_of_p() -> None:
    given = logits(8)
    order = given[0].argsort(descending=True).tolist()
    for temperature in (0.5, 1.0):
        for rank in (0, 1, 2, 9):
            [got] = look_and_read(given.clone(), [ask(top_k=2, temperature=temperature, draft=order[rank])])
            assert got.p_draft == pytest.approx(float(torch.softmax(given[0], -1)[order[rank]]), abs=1e-6)
            assert got.allowed is (rank < 2)
    [greedy] = look_and_read(given.clone(), [ask(temperature=0.0, draft=order[9])])
    assert greedy.allowed
    [banned] = look_and_read(given.clone(), [ask(temperature=0.0, draft=order[0], banned=(order[0],))])
    assert (banned.allowed, banned.p_draft) == (False, 0.0)


def test_rows_are_read_each_by_its_own_question() -> None:
    given = logits(9, rows=3)
    asks = [
        ask(temperature=0.0, num_topk=2),
        ask(repetition_penalty=1.5, prompt=(1, 2, 3), num_topk=5, position=4),
        ask(temperature=0.7, top_p=0.5, draft=6, num_topk=3),
    ]
    together = look_and_read(given.clone(), asks)
    alone = [look_and_read(given[i : i + 1].clone(), [a])[0] for i, a in enumerate(asks)]
    assert alone == together
    assert [len(r.topk.ids) for r in together] == [2, 5, 3]


def test_rows_that_draw_are_read_as_if_alone() -> None:
    fields = [{}, {"temperature": 0.0}, {"top_p": 0.7}, {"top_k": 4, "temperature": 0.6}, {"min_p": 0.1}]
    given = logits(12, rows=40)
    asks = [ask(**fields[i % 5], draft=i, position=i, choice=i % 3) for i in range(40)]
    together = look_and_read(given.clone(), asks)
    assert [look_and_read(given[i : i + 1].clone(), [a])[0] for i, a in enumerate(asks)] == together
    chances = torch.softmax(given.double(), -1)
    assert [r.p_token for r in together] == pytest.approx(
        [float(chances[i, r.token]) for i, r in enumerate(together)], abs=1e-6
    )


def test_logits_born_in_inference_mode_can_be_shaped() -> None:
    """The models' logits are inference tensors; writing to them outside inference mode is refused."""
    with torch.inference_mode():
        given = logits(10)
    [got] = look_and_read(given, [ask(temperature=0.0, logit_bias=((13, 100.0),))])
    assert got.token == 13


def test_nothing_asked_nothing_read() -> None:
    assert look_and_read(torch.empty(0, VOCAB), []) == []


def test_plain_means_untouched() -> None:
    assert ask().plain
    for field in ({"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": -0.1}):
        assert not ask(**field).plain
    assert not structs.replace(ask(), banned=(1,)).plain
    assert not structs.replace(ask(), small_penalty=1.1).plain


def test_a_hidden_state_is_given_in_float16_where_it_is_asked_for() -> None:
    hidden = torch.tensor([[1.0, -0.333251953125], [1e9, 2.0]])
    asks = [ask(), ask(hidden=True)]
    first, second = look_and_read(torch.randn(2, VOCAB), asks, None, hidden)
    assert first.signals.hidden is None
    assert struct.unpack("<2e", second.signals.hidden) == (65504.0, 2.0)
    (plain,) = look_and_read(torch.randn(1, VOCAB), [ask(hidden=True)])
    assert plain.signals.hidden is None


# ---- what probes are drawn with


def test_uniform_is_uniform_and_a_float32() -> None:
    """Kolmogorov-Smirnov: the statistic times sqrt(n) exceeds 2.7 with probability < 1e-6."""
    values = [uniform(f"probe:{i}") for i in range(3000)]
    gap = max(abs((i + 0.5) / 3000 - v) for i, v in enumerate(sorted(values)))
    assert gap * math.sqrt(3000) < 2.7
    assert torch.tensor(values, dtype=torch.float32).double().tolist() == values

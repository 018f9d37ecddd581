"""The promises of DESIGN.md on real (tiny) models in fp32: what routing may never change."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fakes import Answer, Gathered, ask_for, decode, decode_one, with_policy
from tiny_pair import TinyPair
from transformers import AutoModelForCausalLM

from gateway.core import Accept, FinishReason, Mode, Step, Tier
from gateway.policy import Policy
from gateway.prefix import PrefixCache
from gateway.request import Request

LENGTHS = (3, 8, 15, 24, 40)
NUM_NEW = 10
OPENINGS = (
    "Once upon a time there was a small gateway",
    "def merge(a, b): return sorted(a + b)  # ok",
    "SELECT name, count(*) FROM users GROUP BY 1",
    "你好、世界。请用一句话介绍你自己、谢谢大家帮忙。",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144",
    '{"role": "user", "content": [1, 2, 3, 4, 5]}',
    "Dear Sir or Madam, I am writing to you about",
    "The quick brown fox jumps over the lazy dog.",
    "import os\\nimport sys\\n\\nprint(os.environ[0])",
    "¿Qué hora es? Son las tres y media de la tarde",
)
"""Ten openings; cut to five lengths in bytes they are the fifty prompts."""

SAMPLED = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20, "repetition_penalty": 1.2},
    {"temperature": 0.9, "min_p": 0.05, "presence_penalty": 0.4, "frequency_penalty": 0.2},
)


def prompts() -> list[tuple[int, ...]]:
    return [tuple(text.encode()[:length]) for length in LENGTHS for text in OPENINGS]


def exact_policy(i: int) -> Policy:
    """Draft lengths 1..8, protected prefixes 0..2, and thresholds from `draft everything` to the default."""
    return Policy(draft_length=1 + i % 8, protect_first=i % 3, threshold=(0.0, 0.3, 0.5)[i % 3])


def greedy_requests() -> list[Request]:
    return [
        ask_for(f"g{i}", prompt, policy=exact_policy(i), max_tokens=NUM_NEW)
        for i, prompt in enumerate(prompts())
    ]


def sampled_requests() -> list[Request]:
    return [
        ask_for(
            f"s{i}",
            prompt,
            policy=exact_policy(i + 3),
            max_tokens=NUM_NEW,
            seed=i * i + 1,
            **SAMPLED[i % len(SAMPLED)],
        )
        for i, prompt in enumerate(prompts())
    ]


def neighbours(num: int) -> list[Request]:
    """Requests of every other mode, rule and sampling, to share batches with."""
    others = (
        Policy(mode=Mode.LARGE_ONLY),
        Policy(mode=Mode.SMALL_ONLY),
        Policy(mode=Mode.SHADOW, protect_first=1),
        Policy(accept=Accept.TRUST, protect_first=0, threshold=0.3),
        Policy(accept=Accept.THRESHOLD, protect_first=1, draft_length=8, threshold=0.1),
        Policy(accept=Accept.TOKEN_V3, protect_first=0, threshold=0.2),
        Policy(accept=Accept.TYPICAL, protect_first=2, threshold=0.1, small_repetition_penalty=1.2),
    )
    samplings = ({"temperature": 0.0}, *SAMPLED)
    return [
        replace(
            ask_for(
                f"n{i}",
                prompts()[(i * 7) % 50],
                policy=others[i % len(others)],
                max_tokens=4 + i % 14,
                seed=i,
                **samplings[i % len(samplings)],
            ),
            audited=i % 2 == 0,
        )
        for i in range(num)
    ]


@pytest.fixture(scope="module")
def large_only(tiny_pair: TinyPair) -> Gathered:
    """The answers of `large_only` to all hundred requests."""
    requests = [with_policy(r, mode=Mode.LARGE_ONLY) for r in (*greedy_requests(), *sampled_requests())]
    return decode(tiny_pair.engine(), requests)


def test_greedy_large_only_is_transformers_generate(tiny_pair: TinyPair, large_only: Gathered) -> None:
    hf = AutoModelForCausalLM.from_pretrained(tiny_pair.folder / "large", dtype=torch.float32).eval()
    requests = greedy_requests()
    for first in range(0, 50, 10):
        ids = torch.tensor([r.prompt_ids for r in requests[first : first + 10]])
        with torch.no_grad():
            out = hf.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False
            )
        for request, row in zip(requests[first : first + 10], out[:, ids.shape[1] :].tolist(), strict=True):
            got = large_only[request.id, 0]
            assert row[: len(got.tokens)] == got.tokens
            assert len(got.tokens) == NUM_NEW or got.tokens[-1] in tiny_pair.tokenizer.eos_ids


@pytest.mark.parametrize("requests", [greedy_requests, sampled_requests])
def test_exact_is_large_only_token_for_token_alone(
    tiny_pair: TinyPair, large_only: Gathered, requests
) -> None:
    num_small = 0
    for request in requests():
        got = decode_one(tiny_pair.engine(), request)
        assert large_only[request.id, 0].tokens == got.tokens, request
        assert large_only[request.id, 0].text == got.text
        num_small += got.finished.counts.small_tokens
    assert num_small > 50, "hardly anything was drafted: this shows nothing"


@pytest.mark.parametrize("requests", [greedy_requests, sampled_requests])
def test_exact_is_large_only_token_for_token_in_mixed_batches(
    tiny_pair: TinyPair, large_only: Gathered, requests
) -> None:
    known, others = requests(), neighbours(20)
    for first in range(0, 50, 13):
        mine = known[first : first + 13]
        company = others[first % 7 :][: 16 - len(mine)] if len(mine) == 13 else others[:5]
        crowd = [r for pair in zip(mine, [*company] * 5, strict=False) for r in pair]
        crowd = list({r.id: r for r in crowd}.values())
        engine = tiny_pair.engine(large_wait_s=0.002 * (first % 2), prefill_chunk=64 if first else 512)
        got = decode(engine, crowd)
        for request in mine:
            assert large_only[request.id, 0].tokens == got[request.id, 0].tokens, request


def routes(answer: Answer) -> list[tuple[object, ...]]:
    """Tokens and decisions of a tape, without the numbers that depend on the shape of a batch."""
    columns = (
        "seq",
        "idx",
        "token_id",
        "tier",
        "outcome",
        "action",
        "reason",
        "draft_pos",
        "round",
        "draft_limit",
    )
    return [tuple(getattr(row, name) for name in columns) for row in answer.tape]


def test_lossy_tokens_and_routes_do_not_depend_on_neighbours(tiny_pair: TinyPair) -> None:
    requests = neighbours(10)
    together = decode(tiny_pair.engine(), requests)
    for request in requests:
        assert routes(decode_one(tiny_pair.engine(), request)) == routes(together[request.id, 0])


def test_numbers_of_the_tape_hardly_depend_on_neighbours(tiny_pair: TinyPair) -> None:
    [request] = [r for r in neighbours(8) if r.policy.accept is Accept.THRESHOLD]
    alone = decode_one(tiny_pair.engine(), request)
    together = decode(tiny_pair.engine(), neighbours(16))[request.id, 0]

    def numbers(row: Step) -> list[float]:
        return [row.signals.top1_p, row.signals.gap, row.signals.entropy, row.p_large]

    for a, b in zip(alone.output, together.output, strict=True):
        assert numbers(a) == pytest.approx(numbers(b), abs=1e-4)


def test_most_tokens_of_the_tiny_pair_are_the_small_models(tiny_pair: TinyPair) -> None:
    """The pair is a fair stand-in: routing it by default leaves the large model a minority of tokens."""
    policy = Policy(protect_first=0)
    requests = [ask_for(f"t{i}", p, policy=policy, max_tokens=24) for i, p in enumerate(prompts()[20:30])]
    got = decode(tiny_pair.engine(), requests)
    counts = [answer.finished.counts for answer in got.values()]
    large, total = sum(c.large_tokens for c in counts), sum(c.completion_tokens for c in counts)
    assert 0.1 < large / total < 0.75


def test_text_is_the_decoded_tokens_and_deltas_are_whole_characters(tiny_pair: TinyPair) -> None:
    for request in (greedy_requests()[33], sampled_requests()[23]):
        got = decode_one(tiny_pair.engine(), request)
        shown = [t for t in got.tokens if t not in tiny_pair.tokenizer.eos_ids]
        assert tiny_pair.tokenizer.decode(shown) == got.text
        assert [tiny_pair.tokenizer.token_bytes(s.token_id) for s in got.written] == [
            s.token_bytes for s in got.written
        ]


def test_a_prefix_kept_from_another_answer_changes_no_token(tiny_pair: TinyPair) -> None:
    text = ("A long and common beginning that both requests share. " * 2).encode()
    first, second = (
        ask_for(i, [*text, *tail], policy=Policy(protect_first=1), max_tokens=10)
        for i, tail in (("a", b"And the"), ("b", b"But no"))
    )
    expected = {r.id: decode_one(tiny_pair.engine(), r).tokens for r in (first, second)}
    engine = tiny_pair.engine(prefixes=PrefixCache(4))
    for request in (first, second, first):
        engine.add(request)
        got = Gathered()
        while not engine.idle:
            got.take(engine.tick())
        assert expected[request.id] == got[request.id, 0].tokens
    assert engine.prefixes.num_blocks == engine.pool.num_blocks - engine.pool.num_free > 0


def test_a_client_that_leaves_makes_room_for_the_next(tiny_pair: TinyPair) -> None:
    engine = tiny_pair.engine(num_blocks=1)
    first, second = greedy_requests()[:2]
    engine.add(first)
    engine.add(second)
    engine.tick()
    assert [r.request.id for r in engine.rows] == [first.id]
    [delta] = engine.cancel(first.id).deltas
    assert delta.finished.reason is FinishReason.ABORT
    engine.tick()
    assert [r.request.id for r in engine.rows] == [second.id]
    engine.cancel(second.id)
    assert engine.pool.num_free == 1


def test_protected_tokens_are_the_large_models(tiny_pair: TinyPair) -> None:
    got = decode_one(
        tiny_pair.engine(), ask_for("p", prompts()[44], policy=Policy(protect_first=6), max_tokens=16)
    )
    assert {Tier.LARGE} == {row.tier for row in got.output[:6]}
    assert got.finished.counts.protected_tokens == min(6, len(got.tokens))

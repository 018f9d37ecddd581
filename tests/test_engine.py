"""The decode loop over scripted models: every token, signal and label against the script itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from fakes import (
    Answer,
    Gathered,
    Logits,
    ask_for,
    decode,
    decode_one,
    fake_engine,
    near,
    noise_logits,
    spelling,
    with_policy,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core import Accept, AuditStatus, FinishReason, Mode, Outcome, Reason, Step, Tier
from gateway.engine import Engine
from gateway.load import CostTable, Load
from gateway.lookup import AnswerStore
from gateway.policy import Policy
from gateway.prefix import PrefixCache
from gateway.request import Request

VOCAB = 8
END = VOCAB - 1
LARGE = noise_logits(1, VOCAB)
SMALL = near(LARGE, 2, 1.0)
A, B, C, D, E, F, G = range(7)


def engine(small: Logits = SMALL, large: Logits = LARGE, **options: object) -> Engine:
    return fake_engine(small, large, vocab_size=VOCAB, **options)


def best(logits: Logits, context: tuple[int, ...]) -> int:
    said = logits(context)
    return max(range(VOCAB), key=lambda i: (said[i], -i))


def softmax(logits: Logits, context: tuple[int, ...]) -> list[float]:
    said = [math.exp(x) for x in logits(context)]
    return [x / sum(said) for x in said]


def greedy(prompt: tuple[int, ...], num: int) -> list[int]:
    """The large model's own greedy answer, straight from the script."""
    text = list(prompt)
    for _ in range(num):
        text.append(best(LARGE, tuple(text)))
    return text[len(prompt) :]


MIXED = [
    Policy(protect_first=0),
    Policy(protect_first=3, draft_length=2),
    Policy(protect_first=0, accept=Accept.THRESHOLD, threshold=0.1),
    Policy(protect_first=1, accept=Accept.TOKEN_V3, draft_length=8, threshold=0.2),
    Policy(protect_first=2, accept=Accept.TYPICAL, threshold=0.0),
    Policy(protect_first=1, accept=Accept.TRUST, threshold=0.3),
    Policy(mode=Mode.LARGE_ONLY),
    Policy(mode=Mode.SMALL_ONLY),
    Policy(mode=Mode.SHADOW, protect_first=2),
    Policy(protect_first=0, accept=Accept.THRESHOLD, large_token_budget=3, threshold=0.6),
    Policy(protect_first=1, accept=Accept.TRUST, max_small_run=2, threshold=0.1),
    Policy(protect_first=0, probe_rate=0.3, threshold=0.1),
]
SAMPLINGS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.3, "top_k": 3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 1.0, "min_p": 0.1, "logit_bias": ((2, 1.0),)},
]


def mixed_requests(num: int = 24) -> list[Request]:
    """Every mode, rule and sampling, with prompts of many lengths."""
    return [
        ask_for(
            f"m{i}",
            [(i * 5 + j * 3) % END for j in range(1 + i % 7)],
            policy=MIXED[i % len(MIXED)],
            max_tokens=6 + i % 9,
            seed=i,
            **SAMPLINGS[i % len(SAMPLINGS)],
        )
        for i in range(num)
    ]


# ---- tokens


@pytest.mark.parametrize("mode", [Mode.LARGE_ONLY, Mode.ROUTED, Mode.SHADOW])
def test_greedy_is_the_large_models_own_text(mode: Mode) -> None:
    request = ask_for(prompt=(3, 1, 4), policy=Policy(mode=mode, protect_first=2), max_tokens=20)
    got = decode_one(engine(), request)
    assert greedy((3, 1, 4), 20) == got.tokens
    assert "".join(chr(ord("a") + t) for t in got.tokens) == got.text
    assert got.finished.reason is FinishReason.LENGTH


def test_small_only_is_the_small_models_own_text() -> None:
    got = decode_one(engine(), ask_for(policy=Policy(mode=Mode.SMALL_ONLY), max_tokens=12))
    text = [0, 1]
    for _ in range(12):
        text.append(best(SMALL, tuple(text)))
    assert text[2:] == got.tokens
    assert {(Tier.SMALL, Outcome.KEPT, Reason.MODE)} == {(r.tier, r.outcome, r.reason) for r in got.tape}


exact_cases = st.fixed_dictionaries(
    {
        "noise": st.floats(0.1, 4),
        "draft_length": st.integers(1, 8),
        "threshold": st.sampled_from([0.0, 0.2, 0.6]),
        "protect_first": st.integers(0, 4),
        "max_small_run": st.integers(1, 9),
        "block_size": st.sampled_from([1, 3, 64]),
        "prefill_chunk": st.integers(1, 200),
        "large_wait_s": st.sampled_from([0.0, 0.004]),
        "sampling": st.sampled_from(SAMPLINGS),
        "seed": st.integers(0, 2**40),
        "prompt": st.lists(st.integers(0, END - 1), min_size=1, max_size=90),
        "num_neighbours": st.integers(0, 6),
        # ms of a small pass where a large one costs 1: drafts always, sometimes, never pay.
        "small_cost": st.sampled_from([None, 0.1, 0.5, 0.8, 5.0]),
        "reuse": st.booleans(),
    }
)


def load_where_small_passes_cost(ms: float) -> Load:
    return Load({Tier.SMALL: CostTable((1,), (ms,)), Tier.LARGE: CostTable((1, 8, 64), (1.0, 1.2, 4.0))})


@given(exact_cases)
@settings(max_examples=20, deadline=None)
def test_exact_is_large_only_whatever_the_drafter_the_settings_and_the_company(case: dict) -> None:
    request = ask_for(
        "x",
        case["prompt"],
        policy=Policy(
            draft_length=case["draft_length"],
            threshold=case["threshold"],
            protect_first=case["protect_first"],
            max_small_run=case["max_small_run"],
        ),
        seed=case["seed"],
        max_tokens=10,
        **case["sampling"],
    )
    expected = decode_one(
        engine(max_model_len=128, block_size=128), with_policy(request, mode=Mode.LARGE_ONLY)
    )
    busy = engine(
        near(LARGE, 3, case["noise"]),
        block_size=case["block_size"],
        num_blocks=1000,
        prefill_chunk=case["prefill_chunk"],
        large_wait_s=case["large_wait_s"],
        max_model_len=128,
        load=case["small_cost"] and load_where_small_passes_cost(case["small_cost"]),
        answers=AnswerStore(1000) if case["reuse"] else None,
        prefixes=PrefixCache(3) if case["reuse"] else None,
    )
    if case["reuse"]:  # a first run leaves keys, values and answers to copy from
        decode(busy, [replace(request, id="earlier")])
    got = decode(busy, [*mixed_requests(case["num_neighbours"]), request])["x", 0]
    assert expected.tokens == got.tokens
    assert expected.text == got.text


@pytest.mark.parametrize("chunk", range(1, 82, 4))
def test_drafts_behind_a_long_prompt_are_verified_together_whatever_the_chunk(chunk: int) -> None:
    """The large model's first pass has prompt and drafts to read; a chunk must not end among the drafts."""
    policy = Policy(protect_first=0, threshold=0.0, draft_length=8, lookup=False)
    request = ask_for(prompt=[i % 5 for i in range(70)], policy=policy, max_tokens=10)
    e = engine(small=LARGE, prefill_chunk=chunk, max_model_len=128, block_size=128)
    assert greedy(request.prompt_ids, 10) == decode_one(e, request).tokens


class Alternating:
    """A grammar in which even output positions hold even tokens, odd ones odd; it knows what it was told."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def mask(self) -> torch.Tensor:
        return torch.arange(VOCAB) % 2 == len(self.tokens) % 2

    def advance(self, token: int) -> None:
        assert token % 2 == len(self.tokens) % 2
        self.tokens.append(token)

    def rollback(self, num: int) -> None:
        del self.tokens[len(self.tokens) - num :]


def assert_a_grammar_binds(engine: Callable[[], Engine], policy: Policy, temperature: float) -> None:
    """What is decoded, and what the matcher was told, keeps to the grammar; `exact` is still large-only."""
    matchers: list[Alternating] = []

    def matcher() -> Alternating:
        matchers.append(Alternating())
        return matchers[-1]

    request = ask_for(policy=policy, max_tokens=40, temperature=temperature)
    request = replace(request, constraint=matcher, audited=True)
    got = decode_one(engine(), request)
    assert [t % 2 for t in got.tokens] == [i % 2 for i in range(40)]
    assert matchers[0].tokens == got.tokens
    if policy.accept is Accept.EXACT and policy.mode is not Mode.SMALL_ONLY:
        assert got.tokens == decode_one(engine(), with_policy(request, mode=Mode.LARGE_ONLY)).tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("policy", MIXED)
def test_a_grammar_binds_every_tier_and_rolls_back_with_the_drafts(
    policy: Policy, temperature: float
) -> None:
    assert_a_grammar_binds(engine, policy, temperature)


def test_choices_of_one_request_draw_differently_and_seeds_repeat() -> None:
    requests = [ask_for("n", choice=c, temperature=1.0, max_tokens=16) for c in range(3)]
    got, again = decode(engine(), requests), decode(engine(), requests)
    texts = [got["n", c].tokens for c in range(3)]
    assert len({tuple(t) for t in texts}) == 3
    assert texts == [again["n", c].tokens for c in range(3)]


# ---- distribution

THREE = 3


def chi_square_p(policy: Policy, num: int = 250) -> float:
    """p-value of `the first two tokens follow the large model` over seeds, tokens drawn by the engine.

    Three tokens and no end of text; the chi-square tail is torch's regularized incomplete gamma.
    """
    tables = {f: [0.9, 0.2, -0.6, -99][f:3] + [0.9, 0.2, -0.6][:f] + [-99] for f in range(3)}
    large: Logits = lambda context: tables[context[-1]]  # noqa: E731
    small: Logits = lambda context: [*reversed(tables[context[-1]][:3]), -99]  # noqa: E731
    requests = [
        ask_for(f"s{seed}", (0,), policy=policy, max_tokens=3, seed=seed, temperature=1.0)
        for seed in range(num)
    ]
    crowd = fake_engine(small, large, vocab_size=THREE + 1, num_blocks=num, max_rows=num)
    got = decode(crowd, requests)
    seen = {(i, j): 0 for i in range(THREE) for j in range(THREE)}
    for request in requests:
        seen[tuple(got[request.id, 0].tokens[:2])] += 1
    statistic = 0.0
    for (i, j), count in seen.items():
        expected = num * softmax4(tables[0])[i] * softmax4(tables[i])[j]
        statistic += (count - expected) ** 2 / expected
    degrees = len(seen) - 1
    return float(
        torch.special.gammaincc(torch.tensor(degrees / 2).double(), torch.tensor(statistic / 2).double())
    )


def softmax4(said: list[float]) -> list[float]:
    weights = [math.exp(x) for x in said]
    return [x / sum(weights) for x in weights]


def test_exact_sampling_follows_the_large_models_distribution() -> None:
    assert chi_square_p(Policy(protect_first=0, threshold=0.0)) > 1e-6


def test_the_distribution_test_notices_sampling_from_the_small_model() -> None:
    assert chi_square_p(Policy(protect_first=0, threshold=0.0, accept=Accept.TRUST)) < 1e-6


def test_the_distribution_test_notices_a_lossy_rule() -> None:
    lossy = Policy(protect_first=0, threshold=0.0, accept=Accept.THRESHOLD, accept_threshold=0.1)
    assert chi_square_p(lossy) < 1e-6


# ---- the tape against the script


def context_of(request: Request, answer: Answer, idx: int) -> tuple[int, ...]:
    return (*request.prompt_ids, *answer.tokens[:idx])


@pytest.mark.parametrize("policy", MIXED)
@pytest.mark.parametrize("audited", [False, True])
def test_signals_and_labels_are_what_the_models_say_at_that_position(policy: Policy, audited: bool) -> None:
    request = replace(ask_for(prompt=(5, 2), policy=policy, max_tokens=24), audited=audited)
    got = decode_one(engine(), request)
    for row in got.output:
        context = context_of(request, got, row.idx)
        small, large = softmax(SMALL, context), softmax(LARGE, context)
        if row.signals is not None:
            first, second = sorted(small, reverse=True)[:2]
            assert row.signals.top1_p == pytest.approx(first, abs=1e-6)
            assert row.signals.gap == pytest.approx(first - second, abs=1e-6)
            assert row.signals.entropy == pytest.approx(-sum(p * math.log(p) for p in small if p), abs=1e-5)
            assert row.small_choice == best(SMALL, context)
            assert row.small_topk.ids[0] == best(SMALL, context)
        if row.large_choice is not None:
            assert row.large_choice == best(LARGE, context)
            assert row.p_large == pytest.approx(large[row.token_id], abs=1e-6)
            assert row.large_topk.logprobs[0] == pytest.approx(math.log(max(large)), abs=1e-5)
            if row.small_choice is not None and row.tier is not Tier.LOOKUP:
                assert row.audit_agrees is (row.small_choice == row.large_choice)
    labelled = [row.large_choice is not None for row in got.output]
    if audited or (policy.verified and policy.large_token_budget is None):
        assert all(labelled)
        assert got.audit is (AuditStatus.COMPLETE if audited else AuditStatus.NOT_CHOSEN)


def test_trust_labels_come_at_the_catch_up_and_not_for_the_tail() -> None:
    request = ask_for(policy=Policy(protect_first=0, accept=Accept.TRUST, threshold=0.3), max_tokens=30)
    got = decode_one(engine(), request)
    kept = [row for row in got.output if row.outcome is Outcome.KEPT]
    last_large = max(row.idx for row in got.output if row.tier is Tier.LARGE)
    assert kept
    for row in kept:
        assert row.audit_source == ("catchup" if row.idx < last_large else None)
    audited = decode_one(engine(), replace(request, audited=True))
    assert audited.tokens == got.tokens
    assert all(r.audit_source == "posthoc" for r in audited.output if r.idx > last_large)


@pytest.mark.parametrize("num", [1, 3, 10])
@pytest.mark.parametrize("accept", [Accept.EXACT, Accept.TRUST])
def test_answers_that_end_inside_the_protected_prefix_carry_signals(num: int, accept: Accept) -> None:
    got = decode_one(engine(), ask_for(policy=Policy(accept=accept), max_tokens=num))
    assert len(got.output) == num
    assert {Reason.PROTECTED_PREFIX} == {row.reason for row in got.output}
    assert got.finished.counts.protected_tokens == num
    assert all(row.signals is not None for row in got.output)


def test_protected_bonus_and_deferred_tokens_are_the_large_models() -> None:
    policy = Policy(protect_first=2, draft_length=3, threshold=0.0, lookup=False)
    got = decode_one(engine(small=LARGE), ask_for(policy=policy, max_tokens=10))
    assert [r.outcome for r in got.output] == [
        *[Outcome.LARGE] * 2,
        *[Outcome.ACCEPTED] * 3,
        Outcome.BONUS,
        *[Outcome.ACCEPTED] * 3,
        Outcome.BONUS,
    ]
    assert [r.reason for r in got.output if r.tier is Tier.LARGE] == [
        *[Reason.PROTECTED_PREFIX] * 2,
        *[Reason.DRAFT_FULL] * 2,
    ]
    assert [r.draft_pos for r in got.output] == [0, 0, 0, 1, 2, 3, 0, 1, 2, 3]
    assert [r.round for r in got.output] == [0, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    counts = got.finished.counts
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_draft_tokens) == (2, 6, 6)
    assert counts.large_passes == 4


def test_a_rejection_discards_what_was_built_on_it() -> None:
    """The large model spells abcdef; the small one abXdef: X is rejected, c recovered, the rest discarded."""
    large = spelling({G: [A, B, C, D, E, F]}, VOCAB)
    small: Logits = lambda context: large(context) if len(context) != 3 else [0.0] * 5 + [9.0, 0.0, 0.0]  # noqa: E731
    policy = Policy(protect_first=0, draft_length=5, threshold=0.0, lookup=False)
    got = decode_one(engine(small, large), ask_for(prompt=(G,), policy=policy, max_tokens=7))
    assert got.text == "abcdef"
    round0 = [(r.outcome, r.idx, r.draft_pos) for r in got.tape if r.round == 0]
    assert round0 == [
        (Outcome.ACCEPTED, 0, 0),
        (Outcome.ACCEPTED, 1, 1),
        (Outcome.REJECTED, 2, 2),
        (Outcome.DISCARDED, 3, 3),
        (Outcome.DISCARDED, 4, 4),
        (Outcome.RECOVERED, 2, 2),
    ]
    recovered = got.tape[5]
    assert (recovered.token_id, recovered.action, recovered.reason, recovered.tier) == (
        C,
        None,
        None,
        Tier.LARGE,
    )
    assert recovered.signals == got.tape[2].signals


def test_a_deferred_proposal_behind_a_rejection_is_on_the_tape() -> None:
    large = spelling({G: [A, B, C, D]}, VOCAB)

    def small(context: tuple[int, ...]) -> list[float]:
        if len(context) == 2:  # surely wrong about the second token, then unsure of the third
            return [0.0] * 5 + [9.0, 0.0, 0.0]
        return [0.1] * VOCAB if len(context) == 3 else large(context)

    policy = Policy(protect_first=0, threshold=0.5, lookup=False)
    got = decode_one(engine(small, large), ask_for(prompt=(G,), policy=policy, max_tokens=4))
    assert [(r.outcome, r.reason) for r in got.tape[:4]] == [
        (Outcome.ACCEPTED, Reason.CONFIDENT),
        (Outcome.REJECTED, Reason.CONFIDENT),
        (Outcome.DISCARDED, Reason.LOW_CONFIDENCE),
        (Outcome.RECOVERED, None),
    ]


def test_the_run_limit_and_the_loop_guard_end_runs() -> None:
    loop = spelling({G: [A, B] * 20}, VOCAB)
    limited = Policy(protect_first=0, max_small_run=3, draft_length=8, lookup=False)
    got = decode_one(engine(loop, loop), ask_for(prompt=(G,), policy=limited, max_tokens=14))
    assert [r.tier for r in got.output[:12]] == [*[Tier.SMALL] * 3, Tier.LARGE] * 3
    assert {Reason.RUN_LIMIT} == {r.reason for r in got.output[:12] if r.tier is Tier.LARGE}

    guarded = Policy(protect_first=0, loop_ngram=2, loop_limit=2, draft_length=8, lookup=False)
    got = decode_one(engine(loop, loop), ask_for(prompt=(G,), policy=guarded, max_tokens=12))
    # ab ba ab ba: the third `ab` completes a bigram seen twice, and every token after it does too.
    hits = [r.idx for r in got.output if r.reason is Reason.LOOP_GUARD]
    assert hits == list(range(5, 12))
    assert got.finished.counts.guard_hits == len(hits)


def test_shadow_records_the_decisions_that_exact_routing_takes() -> None:
    """Under `exact` the text is the same, so position by position the final decision must be, too."""
    calm = Policy(protect_first=2, threshold=0.3, lookup=False)
    guarded = replace(calm, acceptance_weight=0.4, run_weight=-0.3, loop_ngram=2, loop_limit=1)
    for small, policy in (
        (SMALL, calm),
        (SMALL, replace(calm, threshold=0.1, draft_length=2, max_small_run=4)),
        (SMALL, guarded),
        (LARGE, replace(calm, threshold=0.0, loop_limit=0)),  # all accepted, to the last token
    ):
        request = ask_for(policy=policy, max_tokens=40)
        # A token that rode along leaves the position behind it undecided.
        live = decode_one(engine(small, guesses=False), request)
        shadow = decode_one(engine(small), with_policy(request, mode=Mode.SHADOW))
        assert shadow.tokens == live.tokens
        assert {Tier.LARGE} == {r.tier for r in shadow.output}
        last = {r.idx: r for r in live.tape if r.action is not None}
        same = ("action", "reason", "score", "draft_pos", "draft_limit", "run_length", "ema_acceptance")
        for row in shadow.output:
            assert [getattr(row, f) for f in same] == [getattr(last[row.idx], f) for f in same]
            assert row.audit_source == "shadow"


def test_forced_tokens_of_a_fork_are_written_and_decoding_goes_on_from_them() -> None:
    parent = decode_one(engine(), ask_for(policy=Policy(protect_first=0, lookup=False), max_tokens=20))
    other = (parent.tokens[6] + 1) % END
    forced = (*((r.token_id, r.tier) for r in parent.output[:6]), (other, Tier.LARGE))
    for mode in (Mode.ROUTED, Mode.LARGE_ONLY, Mode.SHADOW):
        request = ask_for("f", policy=Policy(mode=mode, protect_first=0, lookup=False), max_tokens=20)
        fork = decode_one(engine(), replace(request, forced=forced))
        assert fork.tokens[:7] == [t for t, _ in forced]
        assert fork.tokens[7:] == greedy((0, 1, *fork.tokens[:7]), 13)
        assert [r.outcome for r in fork.output[:7]] == [Outcome.FORCED] * 7
        for row in fork.output:
            context = context_of(request, fork, row.idx)
            assert row.large_choice == best(LARGE, context)
            assert row.p_large == pytest.approx(softmax(LARGE, context)[row.token_id], abs=1e-6)


def test_an_audited_fork_of_the_small_model_alone_is_labelled_from_its_first_token() -> None:
    request = ask_for("f", policy=Policy(mode=Mode.SMALL_ONLY), max_tokens=9)
    fork = decode_one(engine(), replace(request, audited=True, forced=((B, Tier.SMALL), (A, Tier.LARGE))))
    assert fork.audit is AuditStatus.COMPLETE
    for row in fork.output:
        assert row.large_choice == best(LARGE, context_of(request, fork, row.idx))


def test_a_fork_whose_given_tokens_end_the_answer_decodes_nothing() -> None:
    request = ask_for("f", max_tokens=9, stop=("ba",))
    got = decode_one(engine(), replace(request, forced=((B, Tier.LARGE), (A, Tier.SMALL), (C, Tier.LARGE))))
    assert (got.tokens, got.text, got.finished.reason) == ([B, A], "", FinishReason.STOP)


def test_probes_defer_their_share_of_confident_tokens() -> None:
    policy = Policy(protect_first=0, threshold=0.0, probe_rate=0.25, accept=Accept.TRUST, lookup=False)
    got = decode(engine(), [ask_for(f"p{i}", policy=policy, seed=i, max_tokens=40) for i in range(20)])
    rows = [row for answer in got.values() for row in answer.output]
    probed = [row for row in rows if row.reason is Reason.PROBE]
    # Binomial(800, .25) leaves 200 +- 61 with probability < 1e-6.
    assert 139 < len(probed) < 261
    assert {0.25} == {row.propensity for row in probed}
    assert {0.75} == {row.propensity for row in rows if row.reason is Reason.CONFIDENT}


def test_the_large_token_budget_is_kept_and_the_small_model_writes_on() -> None:
    for accept in (Accept.TRUST, Accept.THRESHOLD):
        policy = Policy(protect_first=2, accept=accept, threshold=0.9, large_token_budget=5, lookup=False)
        got = decode_one(engine(), ask_for(policy=policy, max_tokens=30))
        assert got.finished.counts.large_tokens == 5
        assert [r.reason for r in got.output[-10:]] == [Reason.BUDGET] * 10
        assert {Outcome.KEPT} == {r.outcome for r in got.output if r.reason is Reason.BUDGET}


def test_where_drafts_do_not_pay_the_large_model_writes_and_says_why() -> None:
    policy = Policy(protect_first=0, threshold=0.0, lookup=False)
    got = decode_one(engine(load=load_where_small_passes_cost(9.0)), ask_for(policy=policy, max_tokens=8))
    assert {(Reason.LOAD, Tier.LARGE, 0)} == {(r.reason, r.tier, r.draft_limit) for r in got.output}
    assert got.finished.counts.adapted
    assert got.finished.counts.small_passes == 0


def test_a_repeated_request_is_prefilled_from_kept_keys_and_drafted_from_the_earlier_answer() -> None:
    e = engine(answers=AnswerStore(1000), prefixes=PrefixCache(2), max_model_len=128, block_size=128)
    request = ask_for(
        "first", [i % 5 for i in range(60)], policy=Policy(protect_first=0, draft_length=8), max_tokens=20
    )
    first = decode_one(e, request)
    large = e.tiers[Tier.LARGE].model
    large.feeds.clear()
    again = decode_one(e, replace(request, id="again"))
    assert again.tokens == first.tokens
    assert large.feeds[0][0].start >= 59
    assert again.finished.counts.lookup_tokens > 0
    assert again.finished.counts.large_passes < first.finished.counts.large_passes

    large.feeds.clear()
    stranger = decode_one(e, replace(request, id="stranger", scope="another key"))
    assert stranger.tokens == first.tokens
    assert large.feeds[0][0].start == 0


def test_each_model_copies_only_what_it_has_read_itself() -> None:
    """The small model never reads a large-only answer, so there is nothing of its own to start from."""
    e = engine(prefixes=PrefixCache(2), max_model_len=128, block_size=128, num_blocks=2)
    prompt = [6 - i % 6 for i in range(60)]
    decode_one(e, ask_for("stale", [0] * 60, policy=Policy(mode=Mode.SMALL_ONLY)))
    decode_one(e, ask_for("another", [1] * 60, policy=Policy(mode=Mode.SMALL_ONLY)))
    decode_one(e, ask_for("unread", prompt, policy=Policy(mode=Mode.LARGE_ONLY)))
    routed = ask_for("routed", prompt, policy=Policy(protect_first=0))
    assert signature(decode_one(e, routed)) == signature(decode_one(engine(max_model_len=128), routed))


# ---- endings


def spelled(max_tokens: int = 20, **sampling: object) -> Answer:
    """Both models spell abcdefabcdef and end; everything is drafted, eight at a time."""
    says = spelling({G: [A, B, C, D, E, F] * 2}, VOCAB)
    policy = Policy(protect_first=0, draft_length=8, threshold=0.0, lookup=False)
    return decode_one(
        engine(says, says), ask_for(prompt=(G,), policy=policy, max_tokens=max_tokens, **sampling)
    )


def test_an_end_of_text_inside_an_accepted_run_ends_the_answer() -> None:
    got = spelled()
    assert (got.text, got.finished.reason, got.finished.stop) == ("abcdefabcdef", FinishReason.STOP, None)
    assert (got.tokens[-1], len(got.tokens)) == (END, 13)
    assert got.output[-1].outcome is Outcome.ACCEPTED
    assert {Outcome.DISCARDED} == {r.outcome for r in got.tape if r.idx > 12}


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abcd")])
def test_a_stop_string_inside_an_accepted_run_ends_the_answer(include: bool, text: str) -> None:
    got = spelled(stop=("zz", "cd"), include_stop_str_in_output=include)
    assert (got.text, got.finished.reason, got.finished.stop) == (text, FinishReason.STOP, "cd")
    assert got.tokens == [A, B, C, D]
    assert [r.token_id for r in got.tape if r.outcome is Outcome.DISCARDED] == [E, F, A, B]


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abc")])
def test_a_stop_token_ends_the_answer(include: bool, text: str) -> None:
    got = spelled(stop_token_ids=(C,), include_stop_str_in_output=include)
    assert (got.text, got.tokens, got.finished.stop) == (text, [A, B, C], C)


@pytest.mark.parametrize("num", range(1, 13))
def test_max_tokens_cuts_anywhere(num: int) -> None:
    got = spelled(max_tokens=num)
    assert (got.text, got.finished.reason) == ("abcdefabcdef"[:num], FinishReason.LENGTH)
    assert all(row.signals is not None for row in got.output)


def test_text_held_back_for_a_stop_string_comes_out_at_the_end() -> None:
    assert spelled(max_tokens=3, stop=("cdx",)).text == "abc"


def test_no_end_before_min_tokens() -> None:
    for mode in (Mode.ROUTED, Mode.LARGE_ONLY, Mode.SMALL_ONLY):
        says = spelling({G: [A, B]}, VOCAB)
        request = ask_for(prompt=(G,), policy=Policy(mode=mode, protect_first=0, threshold=0.0), min_tokens=5)
        got = decode_one(engine(says, says), request)
        assert (len(got.tokens), got.tokens[-1], got.finished.reason) == (6, END, FinishReason.STOP)
        assert END not in got.tokens[:5]


def test_no_stop_string_before_min_tokens() -> None:
    """As vLLM has it: stop strings count from the min_tokens-th token on."""
    assert spelled(max_tokens=3, stop=("a",)).text == ""
    late = spelled(max_tokens=3, stop=("a", "c"), min_tokens=3)
    assert (late.text, late.finished.reason) == ("ab", FinishReason.STOP)


def test_an_ignored_end_is_just_a_token() -> None:
    says = spelling({G: [A, B]}, VOCAB)
    got = decode_one(engine(says, says), ask_for(prompt=(G,), max_tokens=5, ignore_eos=True))
    assert (got.tokens, got.finished.reason) == ([A, B, END, END, END], FinishReason.LENGTH)


def test_an_answer_ends_where_the_context_is_full() -> None:
    got = decode_one(engine(max_model_len=12), ask_for(prompt=[1] * 9, max_tokens=50))
    assert (len(got.tokens), got.finished.reason) == (3, FinishReason.LENGTH)


def test_what_can_never_be_served_is_refused() -> None:
    e = engine(num_blocks=2, block_size=8, max_model_len=64)
    for bad, why in [
        (ask_for(prompt=()), "prompt"),
        (ask_for(prompt=[1] * 64), "63 fit"),
        (ask_for(prompt=[1] * 10, max_tokens=7), "KV cache"),
        (ask_for(prompt=[1, VOCAB]), "vocabulary"),
        (ask_for(prompt=[-1]), "vocabulary"),
        (ask_for(logit_bias=((VOCAB, 1.0),)), "vocabulary"),
        (ask_for(stop_token_ids=(VOCAB,)), "vocabulary"),
        (ask_for(max_tokens=0), "max_tokens"),
    ]:
        with pytest.raises(ValueError, match=why):
            e.check(bad)
    e.check(ask_for(prompt=[1] * 10, max_tokens=6))


# ---- company


def signature(answer: Answer) -> list[tuple[object, ...]]:
    """What the tape says but for when, in which pass and in what company."""
    when_and_where = ("tick", "pass_id", "batch_rows", "small_kv", "large_kv", "latency_us", "ts")
    return [
        tuple(getattr(row, name) for name in Step.__struct_fields__ if name not in when_and_where)
        for row in answer.tape
    ]


def test_tokens_and_routes_do_not_depend_on_neighbours() -> None:
    requests = [replace(r, audited=i % 3 == 0) for i, r in enumerate(mixed_requests(12))]
    together = decode(engine(large_wait_s=0.003), requests)
    for request in requests:
        alone = decode_one(engine(), request)
        assert signature(alone) == signature(together[request.id, 0])


def test_rows_wait_for_blocks_and_all_complete() -> None:
    requests = mixed_requests(12)
    e = engine(num_blocks=2, max_model_len=64)
    got = Gathered()
    for request in requests:
        e.add(request)
    while not e.idle:
        got.take(e.tick())
        assert len(e.rows) <= 2
        assert e.pool.num_free == 2 - len(e.rows)
    free = decode(engine(), requests)
    for request in requests:
        assert free[request.id, 0].tokens == got[request.id, 0].tokens


def test_no_more_rows_than_allowed() -> None:
    e = engine(max_rows=3)
    for request in mixed_requests(8):
        e.add(request)
    most = 0
    while not e.idle:
        e.tick()
        most = max(most, len(e.rows))
    assert most == 3


def test_tiers_are_not_in_lockstep() -> None:
    """A large-only row moves on while another drafts, and the drafting row does not wait for it either."""
    e = engine(large_wait_s=0.0)
    e.add(ask_for("l", policy=Policy(mode=Mode.LARGE_ONLY), max_tokens=12))
    e.add(
        ask_for(
            "r", policy=Policy(protect_first=0, threshold=0.0, draft_length=8, lookup=False), max_tokens=12
        )
    )
    progress: list[tuple[int, int]] = []
    while not e.idle:
        e.tick()
        progress.append(tuple(next((r.seq for r in e.rows if r.request.id == i), 12) for i in "lr"))
    assert any(0 < a < 12 and b == 0 for a, b in progress)


def test_a_long_prompt_stalls_nobody_by_more_than_a_chunk() -> None:
    """While 900 tokens are prefilled in chunks of 100, the decoding row is in every pass of its tier."""
    for mode in (Mode.LARGE_ONLY, Mode.SMALL_ONLY):
        e = engine(max_model_len=1000, block_size=1000, prefill_chunk=100)
        e.add(ask_for("d", policy=Policy(mode=mode), max_tokens=30))
        e.tick()
        e.add(ask_for("long", [i % END for i in range(900)], policy=Policy(mode=mode), max_tokens=2))
        model = e.tiers[Tier.LARGE if mode is Mode.LARGE_ONLY else Tier.SMALL].model
        model.feeds.clear()
        while len(e.rows) + len(e.waiting) == 2:
            e.tick()
        assert len(model.feeds) == 10
        for feeds in model.feeds:
            assert sum(len(f.tokens) for f in feeds) <= 101
            assert 1 in [len(f.tokens) for f in feeds]


# ---- cancelling and failing


@pytest.mark.parametrize("policy", MIXED)
def test_cancelling_in_any_state_frees_everything_at_once(policy: Policy) -> None:
    for num_ticks in range(14):
        e = engine()
        request = replace(ask_for("c", [1, 2, 3], policy=policy, max_tokens=8), audited=True)
        e.check(request)
        e.add(request)
        got = Gathered()
        for _ in range(num_ticks):
            got.take(e.tick())
        was = got["c", 0]
        answered, settled = was.finished, was.audit
        got.take(e.cancel("c"))
        assert e.idle
        assert e.pool.num_free == e.pool.num_blocks
        assert was.audit is not None
        if answered is None:
            assert was.finished.reason is FinishReason.ABORT
            assert was.tokens == [r.token_id for r in was.tape if r.written]
        if settled is None and answered is None:
            assert was.audit is not AuditStatus.COMPLETE or all(
                r.large_choice is not None for r in was.output
            )
        assert not e.cancel("c").deltas


def test_drafts_that_wait_when_a_request_is_cancelled_are_discarded_on_the_tape() -> None:
    says = spelling({G: [A, B, C, D]}, VOCAB)
    e = engine(says, says)
    e.add(ask_for("c", (G,), policy=Policy(protect_first=0, threshold=0.0, lookup=False), max_tokens=8))
    for _ in range(3):
        e.tick()
    tick = e.cancel("c")
    assert [(s.idx, s.token_id, s.outcome) for s in tick.steps] == [
        (i, token, Outcome.DISCARDED) for i, token in enumerate((A, B, C))
    ]


def test_cancelling_one_request_touches_no_other() -> None:
    requests = mixed_requests(12)
    e, got = engine(num_blocks=6), Gathered()
    for request in requests:
        e.add(request)
    for n in range(2000):
        if e.idle:
            break
        got.take(e.tick())
        if n in (3, 9):  # one that runs, one that waits
            got.take(e.cancel("m1" if n == 3 else "m11"))
    assert e.pool.num_free == e.pool.num_blocks
    for request in requests:
        answer = got[request.id, 0]
        expected = decode_one(engine(), request)
        if request.id in ("m1", "m11"):
            assert answer.finished.reason is FinishReason.ABORT
            assert answer.tokens == expected.tokens[: len(answer.tokens)]
        else:
            assert answer.tokens == expected.tokens


@pytest.mark.parametrize("tier", [Tier.SMALL, Tier.LARGE])
def test_a_failing_pass_ends_its_rows_alone_and_leaks_nothing(tier: Tier) -> None:
    requests = mixed_requests(12)
    e, got = engine(), Gathered()
    for request in requests:
        e.add(request)
    failed = False
    while not e.idle:
        plan = e.scheduler.plan(e.rows, e.clock())
        fail_now = not failed and e.num_ticks > 6 and plan is not None and plan.tier is tier
        e.tiers[tier].model.error = RuntimeError("out of memory") if fail_now else None
        tick = e.tick()
        got.take(tick)
        failed |= any(d.finished and d.finished.reason is FinishReason.ERROR for d in tick.deltas)
        e.tiers[tier].model.error = None
    assert failed
    assert e.pool.num_free == e.pool.num_blocks
    reasons = {got[r.id, 0].finished.reason for r in requests}
    assert {FinishReason.ERROR, FinishReason.LENGTH} <= reasons | {FinishReason.LENGTH}
    for request in requests:
        answer = got[request.id, 0]
        assert answer.audit is not None
        expected = decode_one(engine(), request).tokens
        if answer.finished.reason is FinishReason.ERROR:
            assert answer.finished.error == "out of memory"
            assert answer.tokens == expected[: len(answer.tokens)]
        else:
            assert answer.tokens == expected


ALL_MIXED = mixed_requests()


@given(st.lists(st.tuples(st.sampled_from(["add", "tick", "cancel"]), st.integers(0, 23)), max_size=60))
@settings(max_examples=25, deadline=None)
def test_blocks_are_never_lost_whatever_is_admitted_and_cancelled(played: list[tuple[str, int]]) -> None:
    e, got, known = engine(num_blocks=5, block_size=16), Gathered(), ALL_MIXED
    added: set[str] = set()
    for kind, n in played:
        if kind == "add" and known[n].id not in added:
            added.add(known[n].id)
            e.add(known[n])
        elif kind == "tick":
            got.take(e.tick())
        elif kind == "cancel":
            got.take(e.cancel(known[n].id))
        held = [b for row in e.rows for b in row.blocks]
        assert len(set(held)) == len(held)
        assert e.pool.num_free == 5 - len(held)
    for request_id in added:
        got.take(e.cancel(request_id))
    assert e.pool.num_free == 5
    assert all(got[request_id, 0].finished is not None for request_id in added)

"""The router's rules and the fold of a choice's past, against plain recomputation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from gateway.core import Accept, Action, Mode, Reason, Signals
from gateway.policy import EMA_DECAY, Decision, History, Policy, State, decide, decide_early, f32, score

unit = st.floats(0, 1, width=32)
signals = st.builds(Signals, top1_p=unit, gap=unit, entropy=st.floats(0, 8, width=32))
states = st.builds(
    State,
    idx=st.integers(0, 40),
    draft_pos=st.integers(0, 9),
    draft_limit=st.integers(0, 9),
    run_length=st.integers(0, 70),
    guard_value=st.integers(0, 5).map(float),
    ema_acceptance=unit,
    large_used=st.integers(0, 40),
    probe_u=st.none() | unit,
)
policies = st.builds(
    Policy,
    accept=st.sampled_from(Accept),
    threshold=unit,
    draft_length=st.integers(1, 8),
    protect_first=st.integers(0, 12),
    max_small_run=st.integers(1, 10),
    large_token_budget=st.none() | st.integers(12, 20),
    loop_limit=st.integers(0, 3),
    loop_ngram=st.integers(1, 5),
)


def state(**fields: object) -> State:
    given = State(
        idx=20, draft_pos=0, draft_limit=5, run_length=0, guard_value=0.0, ema_acceptance=1.0, large_used=0
    )
    return structs.replace(given, **fields)


SURE, UNSURE = Signals(0.9, 0.875, 0.25), Signals(0.5, 0.125, 2.0)
P = Policy()


@pytest.mark.parametrize(
    ("policy", "at", "said", "action", "reason"),
    [
        (Policy(mode=Mode.LARGE_ONLY), state(), SURE, Action.DEFER, Reason.MODE),
        (Policy(mode=Mode.SMALL_ONLY), state(idx=0), UNSURE, Action.KEEP, Reason.MODE),
        (P, state(idx=9), SURE, Action.DEFER, Reason.PROTECTED_PREFIX),
        (P, state(idx=10), SURE, Action.KEEP, Reason.CONFIDENT),
        (P, state(draft_pos=5), SURE, Action.DEFER, Reason.DRAFT_FULL),
        (P, state(draft_pos=4), SURE, Action.KEEP, Reason.CONFIDENT),
        (P, state(run_length=64), SURE, Action.DEFER, Reason.RUN_LIMIT),
        (P, state(run_length=63), SURE, Action.KEEP, Reason.CONFIDENT),
        (P, state(guard_value=3.0), SURE, Action.DEFER, Reason.LOOP_GUARD),
        (P, state(guard_value=2.0), SURE, Action.KEEP, Reason.CONFIDENT),
        (Policy(loop_limit=0), state(guard_value=9.0), SURE, Action.KEEP, Reason.CONFIDENT),
        (P, state(), UNSURE, Action.DEFER, Reason.LOW_CONFIDENCE),
        (P, state(), Signals(0.7, 0.5, 1.0), Action.KEEP, Reason.CONFIDENT),
        (Policy(large_token_budget=12), state(large_used=12), UNSURE, Action.KEEP, Reason.BUDGET),
        (Policy(large_token_budget=12), state(large_used=11), UNSURE, Action.DEFER, Reason.LOW_CONFIDENCE),
        # The budget stands above the limits and the guard, below the protected prefix.
        (
            Policy(large_token_budget=12),
            state(large_used=12, run_length=99, draft_pos=9, guard_value=9.0),
            UNSURE,
            Action.KEEP,
            Reason.BUDGET,
        ),
        (
            Policy(large_token_budget=12),
            state(large_used=12, idx=3),
            UNSURE,
            Action.DEFER,
            Reason.PROTECTED_PREFIX,
        ),
        (Policy(probe_rate=0.25), state(probe_u=0.125), SURE, Action.DEFER, Reason.PROBE),
        (Policy(probe_rate=0.25), state(probe_u=0.25), SURE, Action.KEEP, Reason.CONFIDENT),
        (Policy(probe_rate=0.25), state(probe_u=0.125), UNSURE, Action.DEFER, Reason.LOW_CONFIDENCE),
    ],
)
def test_each_rule(policy: Policy, at: State, said: Signals, action: Action, reason: Reason) -> None:
    decided = decide(policy, at, said)
    assert (action, reason) == (decided.action, decided.reason)


@given(policies, states, signals)
def test_early_rules_agree_with_all_rules(policy: Policy, at: State, said: Signals) -> None:
    early = decide_early(policy, at)
    if early is not None:
        assert early == decide(policy, at, said)
        assert early.action is Action.DEFER


@given(policies, states, signals, unit)
def test_raising_the_threshold_never_turns_defer_into_keep(
    policy: Policy, at: State, said: Signals, lower: float
) -> None:
    high = replace(policy, threshold=max(policy.threshold, lower))
    low = replace(policy, threshold=min(policy.threshold, lower))
    if decide(high, at, said).action is Action.KEEP:
        assert decide(low, at, said).action is Action.KEEP


def num_kept(policy: Policy, path: list[tuple[int, Signals]]) -> int:
    """Kept positions of one path on which the models agree, drafts settled whenever the router defers."""
    history, kept = History(policy), 0
    for token, said in path:
        decision = decide(policy, history.state(token, policy.draft_length), said)
        if decision.action is Action.DEFER:
            history.resolve(history.num_drafts, token)
        else:
            kept += 1
            (history.draft if policy.verified and decision.reason is not Reason.BUDGET else history.keep)(
                token
            )
    return kept


@given(policies, st.lists(st.tuples(st.integers(0, 2), signals), max_size=40), unit)
def test_raising_the_threshold_never_raises_the_kept_tokens_of_an_answer(
    policy: Policy, path: list[tuple[int, Signals]], lower: float
) -> None:
    high = replace(policy, threshold=max(policy.threshold, lower))
    low = replace(policy, threshold=min(policy.threshold, lower))
    assert num_kept(high, path) <= num_kept(low, path)


@given(policies, st.lists(st.tuples(st.integers(0, 2), signals), max_size=40))
def test_prefix_and_runs_are_bounded_on_any_path(policy: Policy, path: list[tuple[int, Signals]]) -> None:
    policy = replace(policy, large_token_budget=None)
    history, run = History(policy), 0
    for token, said in path:
        at = history.state(token, policy.draft_length)
        keep = decide(policy, at, said).action is Action.KEEP
        run = run + 1 if keep else 0
        assert not (keep and at.idx < policy.protect_first)
        assert run <= policy.max_small_run
        if keep:
            history.keep(token)
        else:
            history.resolve(0, token)


@given(
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.floats(-2, 2),
    states,
    signals,
)
def test_score_is_the_clipped_sum_in_float32(
    bias: float, gap: float, entropy: float, run: float, acceptance: float, at: State, said: Signals
) -> None:
    policy = Policy(
        bias=bias, gap_weight=gap, entropy_weight=entropy, run_weight=run, acceptance_weight=acceptance
    )
    terms = [
        bias,
        gap * said.gap,
        entropy * said.entropy,
        run * at.run_length / 64,
        acceptance * at.ema_acceptance,
    ]
    got = score(policy, at, said)
    assert got == pytest.approx(min(1.0, max(0.0, math.fsum(terms))), abs=1e-6)
    assert got == float(np.float32(got))


def test_the_default_score_is_the_gap() -> None:
    assert score(Policy(), state(), Signals(0.75, 0.625, 1.0)) == 0.625


@given(st.floats(-1e30, 1e30))
def test_f32_is_numpys_float32(x: float) -> None:
    assert f32(x) == float(np.float32(x))


def test_the_threshold_is_compared_as_the_tape_stores_it() -> None:
    """0.7 as float64 lies above float32(0.7): a gap of exactly float32(0.7) must pass when replayed too."""
    gap = f32(0.7)
    assert gap < 0.7
    assert decide(Policy(threshold=0.7), state(), Signals(0.8, gap, 1.0)).action is Action.KEEP


def test_equal_settings_hash_alike() -> None:
    assert Policy().hash == Policy().hash
    assert Policy().hash != Policy(threshold=0.25).hash
    assert len(Policy().hash) == 12


moves = st.lists(
    st.one_of(
        st.tuples(st.just("draft"), st.integers(0, 2)),
        st.tuples(st.just("keep"), st.integers(0, 2)),
        st.tuples(st.just("resolve"), st.floats(0, 1), st.none() | st.integers(0, 2)),
    ),
    max_size=60,
)


def count(text: list[int], piece: list[int]) -> int:
    return sum(text[i : i + len(piece)] == piece for i in range(len(text) - len(piece) + 1))


@given(st.integers(1, 5), moves, st.integers(0, 2))
@settings(max_examples=200)
def test_history_folds_like_a_recomputation_from_all_that_happened(
    loop_ngram: int, played: list[tuple[object, ...]], proposal: int
) -> None:
    history = History(Policy(loop_ngram=loop_ngram))
    written: list[tuple[int, bool]] = []  # token, by the large model
    waiting: list[int] = []
    verdicts: list[bool] = []
    for move in played:
        if move[0] == "draft":
            history.draft(move[1])
            waiting.append(move[1])
        elif move[0] == "keep" and not waiting:
            history.keep(move[1])
            written.append((move[1], False))
        elif move[0] == "resolve":
            stands = round(move[1] * len(waiting))
            large = move[2] if stands == len(waiting) else (move[2] or 0)
            history.resolve(stands, large)
            verdicts += [True] * stands + [False] * (stands < len(waiting))
            written += [(token, False) for token in waiting[:stands]]
            written += [] if large is None else [(large, True)]
            waiting = []

        text = [token for token, _ in written] + waiting
        by_large = [large for _, large in written] + [False] * len(waiting)
        ema = np.float32(1)
        for stood in verdicts:
            ema = np.float32(EMA_DECAY * float(ema) + (1 - EMA_DECAY) * stood)
        at = history.state(proposal, 7, 0.5)
        assert at.idx == len(text)
        assert at.draft_pos == len(waiting)
        assert at.draft_limit == 7
        assert at.probe_u == 0.5
        assert at.run_length == next((i for i, large in enumerate(reversed(by_large)) if large), len(text))
        assert at.large_used == sum(large for _, large in written)
        assert at.ema_acceptance == float(ema)
        ending = [*text[len(text) - loop_ngram + 1 :], proposal] if len(text) >= loop_ngram - 1 else None
        assert at.guard_value == (0 if ending is None else count(text, ending))
        assert history.state(None, 7).guard_value == 0
        assert history.num_written == len(written)


def test_shadow_folds_a_rejected_proposal_as_its_rejection() -> None:
    keep, defer = Decision(Action.KEEP, Reason.CONFIDENT), Decision(Action.DEFER, Reason.LOW_CONFIDENCE)
    shadow, live = History(Policy()), History(Policy())
    for decision, x, y in [
        (keep, 1, 1),
        (keep, 2, 2),
        (keep, 3, 4),
        (keep, 1, 1),
        (defer, 5, 6),
        (keep, 2, 2),
    ]:
        shadow.shadow(decision, x, y)
    live.draft(1)
    live.draft(2)
    live.draft(3)
    live.resolve(2, 4)
    live.draft(1)
    live.resolve(1, 6)
    live.draft(2)
    assert live.state(0, 5) == shadow.state(0, 5)


def test_shadow_of_trust_keeps_the_run_going_on_the_large_models_text() -> None:
    shadow = History(Policy(accept=Accept.TRUST))
    shadow.shadow(Decision(Action.KEEP, Reason.CONFIDENT), 1, 2)
    shadow.shadow(Decision(Action.KEEP, Reason.CONFIDENT), 3, 3)
    assert (shadow.tokens, shadow.run_length, shadow.large_used) == ([2, 3], 2, 0)

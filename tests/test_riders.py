"""A deferred token that rides along with the large model's pass, over scripted models."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import pairwise

import pytest
from fakes import Answer, Logits, ask_for, decode_one, fake_engine, near, noise_logits

from gateway.core import Accept, Mode, Outcome, Reason, Tier
from gateway.load import CostTable, Load
from gateway.policy import Policy
from gateway.recorded import COLUMNS
from gateway.replay import replay
from gateway.whatif import what_if
from logs.rows import Capture, step_table

VOCAB = 8
LARGE = noise_logits(1, VOCAB)
OTHER = noise_logits(3, VOCAB)
UNSURE = Policy(protect_first=0, threshold=1.0, lookup=False)
"""No gap reaches the threshold: the large model writes everything."""


ALONE = {"ride_along": False, "guesses": False}


def run(small: Logits, policy: Policy, num: int = 12, **options: object) -> Answer:
    engine = fake_engine(small, LARGE, vocab_size=VOCAB, **{"ride_along": True, **options})
    return decode_one(engine, ask_for(policy=policy, max_tokens=num))


def large_passes(answer: Answer) -> int:
    assert answer.finished is not None
    return answer.finished.counts.large_passes


@pytest.mark.parametrize("accept", list(Accept))
def test_where_the_models_agree_a_pass_writes_two_tokens(accept: Accept) -> None:
    policy = replace(UNSURE, accept=accept)
    rode, alone = run(LARGE, policy), run(LARGE, policy, **ALONE)
    assert rode.tokens == alone.tokens
    assert (large_passes(rode), large_passes(alone)) == (6, 12)
    for first, second in zip(rode.output[::2], rode.output[1::2], strict=True):
        assert (first.tier, first.outcome, first.reason) == (Tier.LARGE, Outcome.LARGE, Reason.LOW_CONFIDENCE)
        assert first.small_choice == first.token_id
        assert first.audit_agrees
        assert (second.tier, second.outcome, second.action) == (Tier.LARGE, Outcome.BONUS, None)
        assert second.round == first.round
        assert second.pass_id == first.pass_id
    # What the small model says at a bonus position comes later, and is the same as if asked at once.
    assert [step.signals for step in rode.output] == [step.signals for step in alone.output]


def test_a_rider_that_falls_costs_nothing_but_its_place() -> None:
    rode, alone = run(OTHER, UNSURE), run(OTHER, UNSURE, **ALONE)
    assert rode.tokens == alone.tokens == run(OTHER, Policy(mode=Mode.LARGE_ONLY)).tokens
    agree = [step.small_choice == step.large_choice for step in alone.output]
    assert not all(agree)
    assert large_passes(rode) == sum(step.outcome is Outcome.LARGE for step in rode.output)


def test_a_bonus_never_passes_the_last_token_or_the_budget() -> None:
    for num in (1, 2, 3, 5):
        assert len(run(LARGE, UNSURE, num).tokens) == num
    for budget in (1, 2, 3, 4):
        policy = replace(UNSURE, accept=Accept.TRUST, large_token_budget=budget)
        tiers = [step.tier for step in run(LARGE, policy).output]
        assert tiers == [*[Tier.LARGE] * budget, *[Tier.SMALL] * (12 - budget)]


def test_in_a_loop_nothing_rides() -> None:
    looping = Policy(protect_first=0, threshold=0.0, loop_ngram=1, loop_limit=1, lookup=False)
    answer = run(LARGE, looping, 30)
    assert any(step.reason is Reason.LOOP_GUARD for step in answer.output)
    assert all(step.action is not None for step in answer.output)


@pytest.mark.parametrize("accept", list(Accept))
@pytest.mark.parametrize("threshold", [0.3, 0.5])
def test_what_rode_replays_and_asks_what_if_without_a_flip(accept: Accept, threshold: float) -> None:
    policy = Policy(protect_first=1, accept=accept, threshold=threshold)
    answer = run(near(LARGE, 2, 0.5), policy, 40)
    undecided = [s.idx for s in answer.output if s.outcome is Outcome.BONUS and s.action is None]
    assert undecided
    row = {"request_id": "r", "choice": 0, "policy": asdict(policy)}
    steps = step_table(answer.tape, [1] * len(answer.tape), Capture.FULL).select(COLUMNS)
    assert replay(row, steps).mismatches == []
    asked = what_if(row, steps, policy)
    assert (asked.flips, asked.exact_until, asked.unknown) == ([], None, [])
    assert [d["idx"] for d in asked.decisions] == list(range(40))
    assert [d["idx"] for d in asked.decisions if d["reason"] is None] == undecided
    assert {d["action"] for d in asked.decisions if d["reason"] is None} == {"defer"}
    # And where none would be asked for its word, or every token of the prefix is protected, that is said.
    for other, reason in (
        (replace(policy, mode=Mode.LARGE_ONLY), "mode"),
        (replace(policy, protect_first=40), "protected_prefix"),
    ):
        assert {d["reason"] for d in what_if(row, steps, other).decisions} == {reason}
    # Under settings that keep all they can, somebody decides wherever the token before is not deferred.
    kept = what_if(row, steps, replace(policy, threshold=0.0, max_small_run=100, draft_length=50))
    assert [decision["idx"] for decision in kept.decisions] == list(range(40))
    single = what_if(row, steps, replace(policy, threshold=0.0, draft_length=1))
    assert Reason.DRAFT_FULL in {d["reason"] for d in single.decisions}
    for before, decision in (*pairwise(kept.decisions), *pairwise(single.decisions)):
        assert decision["reason"] is not None or before["reason"] == "low_confidence"
    assert {i for i in undecided if kept.decisions[i]["action"] == "keep"} <= set(kept.flips)
    assert set(kept.flips) & set(undecided)


@pytest.mark.parametrize(
    ("asked", "costs", "rides"),
    [(None, True, True), (None, False, False), (True, False, True), (False, True, False)],
)
def test_by_default_it_rides_where_costs_tell_when_that_pays(
    asked: bool | None, costs: bool, rides: bool
) -> None:
    flat = CostTable((1, 8), (10.0, 10.0))
    load = Load({Tier.SMALL: flat, Tier.LARGE: flat}) if costs else None
    assert fake_engine(OTHER, LARGE, vocab_size=VOCAB, load=load, ride_along=asked).rounds.ride_along is rides


def test_it_rides_while_its_share_of_the_pass_is_cheaper_than_what_it_saves() -> None:
    flat = CostTable((1, 128), (50.0, 50.0))
    steep = CostTable((1, 100), (10.0, 1000.0))
    small = CostTable((1, 128), (10.0, 10.0))
    below, above = (Load({Tier.SMALL: small, Tier.LARGE: large}, ride_along=True) for large in (flat, steep))
    assert below.ride_pays(1)
    # At ten a token a rider costs as much as it saves when it always stands.
    assert not above.ride_pays(1)
    for _ in range(400):
        below.saw_rider(False, guessed=False)
    assert below.ride_pays(1), "in a flat pass even a slim chance is free"


def test_an_expected_round_counts_what_rides() -> None:
    tables = {Tier.SMALL: CostTable((1, 128), (10.0, 10.0)), Tier.LARGE: CostTable((1, 128), (50.0, 50.0))}
    load = Load(tables, ride_along=True)
    load.keep, load.hit, load.ride_hit = 0.5, 1.0, 0.4
    first = next(load.rounds(1))
    # Kept (one half): draft and bonus. Deferred (one half): the large model's token, and .4 of another.
    assert first.tokens == pytest.approx(0.5 * 2 + 0.5 * 1.4)


def test_where_nothing_rides_along_no_round_is_promised_more() -> None:
    load = Load(
        {Tier.SMALL: CostTable((1, 128), (10.0, 10.0)), Tier.LARGE: CostTable((1, 128), (50.0, 50.0))}
    )
    load.keep, load.hit, load.ride_hit = 0.5, 1.0, 0.4
    assert not load.ride_pays(1)
    assert next(load.rounds(1)).tokens == pytest.approx(0.5 * 2 + 0.5)


def test_the_protected_prefix_is_guessed_and_stays_the_large_models() -> None:
    """The first token alone; then five guesses and a sixth token a pass, to the prefix's end."""
    policy = Policy(protect_first=13, draft_length=5, lookup=False, mode=Mode.ROUTED)
    rode, alone = run(LARGE, policy, 13), run(LARGE, policy, 13, **ALONE)
    assert rode.tokens == alone.tokens
    assert (large_passes(rode), large_passes(alone)) == (3, 13)
    for one, other in zip(rode.output, alone.output, strict=True):
        assert (one.tier, one.outcome, one.reason) == (Tier.LARGE, Outcome.LARGE, Reason.PROTECTED_PREFIX)
        assert one.signals == other.signals
        assert one.audit_agrees is other.audit_agrees is True
    assert [step.round for step in rode.output] == [0, *[1] * 6, *[2] * 6]


@pytest.mark.parametrize("draft_length", [1, 2, 5])
@pytest.mark.parametrize("protect_first", [1, 2, 3, 7, 30])
def test_guesses_end_with_the_prefix_and_wrong_ones_fall(protect_first: int, draft_length: int) -> None:
    policy = Policy(protect_first=protect_first, draft_length=draft_length, threshold=0.2)
    for small in (LARGE, near(LARGE, 2, 1.0), OTHER):
        rode, alone = run(small, policy, 24), run(small, policy, 24, **ALONE)
        assert rode.tokens == alone.tokens
        first = rode.output[:protect_first]
        assert {(s.tier, s.reason) for s in first} == {(Tier.LARGE, Reason.PROTECTED_PREFIX)}
        assert Reason.PROTECTED_PREFIX not in {s.reason for s in rode.output[protect_first:]}
        assert [s.signals for s in first] == [s.signals for s in alone.output[:protect_first]]
        assert large_passes(rode) <= large_passes(alone)


def test_as_many_are_guessed_as_the_closed_form_says() -> None:
    tables = {Tier.SMALL: CostTable((1, 128), (10.0, 10.0)), Tier.LARGE: CostTable((1, 128), (50.0, 50.0))}
    load = Load(tables)
    load.guess_hit = 0.8
    speeds = {k: (1 - 0.8 ** (k + 1)) / 0.2 / (10 * k + 50) * 50 for k in range(1, 33)}
    assert load.guess_cap(1) == max(speeds, key=speeds.__getitem__)
    for _ in range(400):
        load.saw_rider(False, guessed=True)
    load.saw_pass(Tier.LARGE, 50.0, 1, 1, 1)
    assert load.guess_cap(1) == 0

"""Which rule decided, told again by gateway.policy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_traces import TEXT, pieces, simulate, summary

from gateway.core import Accept
from gateway.policy import Policy
from replay_ui.rules import policy_of, verdict
from replay_ui.steps import Steps

POLICIES = [
    Policy(protect_first=4),
    Policy(protect_first=2, accept=Accept.TRUST, max_small_run=6),
    Policy(protect_first=0, draft_length=2, loop_ngram=2, loop_limit=1),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_recorded_decision_is_decided_alike_anew(policy: Policy) -> None:
    columns = simulate(pieces(TEXT), policy, seed=3)
    read = policy_of(summary("x", columns, policy))
    assert read == policy
    steps = Steps.read(columns)
    found = [verdict(policy, steps.row(i)) for i in range(len(steps))]
    assert [f.agrees for f in found if f.rules] == [True] * sum(bool(f.rules) for f in found)
    for place, f in enumerate(found):
        fired = [rule for rule in f.rules if rule.verdict in {"keep", "defer"}]
        if f.rules:
            assert [rule.verdict for rule in fired] == [steps.row(place)["action"]]


def test_rules_after_the_one_that_fired_were_not_reached() -> None:
    steps = Steps.read(simulate(pieces(TEXT), POLICIES[0], seed=3))
    rules = {rule.name: rule.verdict for rule in verdict(POLICIES[0], steps.row(0)).rules}
    assert rules["mode"] == "no"
    assert rules["protected"] == "defer"
    assert rules["score"] == rules["loop"] == "not reached"


def test_a_decision_that_differs_from_the_tape_is_told() -> None:
    steps = Steps.read(simulate(pieces(TEXT), POLICIES[0], seed=3))
    kept = next(i for i in range(len(steps)) if steps.row(i)["reason"] == "confident")
    assert verdict(replace(POLICIES[0], threshold=1.0), steps.row(kept)).agrees is False


def test_a_recovered_row_was_decided_by_no_rule() -> None:
    assert verdict(POLICIES[0], {"reason": None, "outcome": "recovered"}).rules == ()


def test_inputs_that_were_not_recorded_leave_it_open() -> None:
    row = {"reason": "confident", "action": "keep", "idx": 12, "gap": None}
    assert verdict(POLICIES[0], row).agrees is None


def test_a_policy_this_version_does_not_know_is_not_guessed() -> None:
    assert policy_of({"policy": {"threshold": 0.5, "clairvoyance": 1}}) is None
    assert policy_of({"policy": None}) is None
    assert policy_of({"policy": '{"threshold": 0.25}'}) == Policy(threshold=0.25)


def test_load_and_looked_up_rows_are_decided_alike_anew() -> None:
    state = {"draft_pos": 0, "run_length": 0, "guard_value": 0.0, "ema_acceptance": 1.0, "large_used": 12}
    busy = {**state, "idx": 12, "draft_limit": 0, "action": "defer", "reason": "load", "tier": "large"}
    copied = {
        **state,
        "idx": 12,
        "draft_limit": 5,
        "action": "keep",
        "reason": "lookup_hit",
        "tier": "lookup",
    }
    for row, name in ((busy, "load"), (copied, "lookup")):
        found = verdict(Policy(), row)
        assert found.agrees is True
        assert [rule.name for rule in found.rules if rule.verdict in {"keep", "defer"}] == [name]

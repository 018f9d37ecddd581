"""Rollouts: sticky arms, units and windows, steps, verdicts, people, restarts; time is a number here."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alerts.losses import METRICS
from alerts.plan import FieldError, Plan, estimate, parse_plan, requests_for
from alerts.rollout import Limits, Rollout, Verdict, WrongState, arm_of, comparable_metrics

GOOD = {
    "agreement": 0.98, "mean_logp_large": -0.1, "acceptance": 0.9, "guard_hits": 0.0, "errors": 0.0,
    "length": 50.0, "ttft": 0.2, "tokens_per_s": 30.0,
}  # fmt: skip
BAD = {**GOOD, "agreement": 0.80, "mean_logp_large": -0.8}
BODY = {"name": "lower", "canary": {"threshold": 0.3}, "steps": [0.25, 0.5], "min_step_s": 10}
SHORT = Limits(window_s=1000.0, no_data_s=100.0, max_units=1500, max_step_s=10_000.0)


def start(now: float = 0.0, limits: Limits = SHORT, gated: bool = False, **changes: Any) -> Rollout:
    plan = parse_plan({**BODY, **changes}, salt="salt")
    return Rollout(plan, [metric.name for metric in METRICS], now, limits, gated=gated)


def traffic(
    rollout: Rollout,
    requests: int,
    values: Callable[[str], dict[str, float]],
    now: float = 0.0,
    gap_s: float = 0.1,
    prefix: str = "r",
) -> float:
    """Requests one after another, each its own unit; judged after every fifth. The time afterwards."""
    for i in range(requests):
        now += gap_s
        unit = f"{prefix}{i}"
        arm = rollout.arm(unit)
        rollout.admit(unit, arm, None, now, audited=True)
        rollout.observe(unit, values(arm), now)
        if i % 5 == 4:
            rollout.tick(now)
        if not rollout.active or rollout.paused:
            break
    return now


def noisy(canary_drop: float = 0.0) -> Callable[[str], dict[str, float]]:
    rng = random.Random(5)

    def values(arm: str) -> dict[str, float]:
        agreement = 1 - rng.betavariate(0.64, 7.36) - (canary_drop if arm == "canary" else 0)
        return {**GOOD, "agreement": agreement, "ttft": rng.uniform(0.1, 0.3)}

    return values


# --- arms ---


@settings(deadline=None)
@given(st.text(max_size=30), st.text(max_size=30), st.floats(0, 1), st.floats(0, 1))
def test_a_raised_weight_moves_nobody_back(salt: str, key: str, a: float, b: float) -> None:
    low, high = sorted((a, b))
    if arm_of(salt, key, low) == "canary":
        assert arm_of(salt, key, high) == "canary"


def test_arms_are_the_contracts_hash() -> None:
    for key in ("u1", "u2", "täst", ""):
        place = int(hashlib.sha256(f"s:{key}".encode()).hexdigest(), 16) % 10000
        for weight in (0.0, 0.01, 0.25, 0.5, 1.0):
            assert arm_of("s", key, weight) == ("canary" if place < round(weight * 10000) else "stable")
    share = sum(arm_of("s", str(i), 0.05) == "canary" for i in range(20_000)) / 20_000
    assert 0.045 < share < 0.055


# --- the plan ---


def test_defaults_and_steps() -> None:
    plan = parse_plan({"name": "a", "canary": {}}, "s")
    assert plan == Plan("a", {}, "s")
    assert (plan.steps, plan.min_units, plan.alpha, plan.margin) == ((0.05, 0.25, 0.5), 50, 0.05, 0.01)
    assert parse_plan({"name": "a", "canary": {}, "weight": 0.2}, "s").steps == (0.2,)
    body = {"name": "a", "canary": {}, "weight": 0.1, "steps": [0.05, 0.25, 1.0]}
    assert parse_plan(body, "s").steps == (0.1, 0.25)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"name": ""}, "name"),
        ({"name": "a/b"}, "name"),
        ({"name": 3}, "name"),
        ({"canary": None}, "canary"),
        ({"canary": "threshold"}, "canary"),
        ({"weight": 0}, "weight"),
        ({"weight": 1.0, "steps": [1.0]}, "weight"),
        ({"weight": True}, "weight"),
        ({"weight": float("nan")}, "weight"),
        ({"steps": []}, "steps"),
        ({"steps": [0.5, 0.25]}, "steps"),
        ({"steps": [0.5, 2]}, "steps[1]"),
        ({"steps": "0.5"}, "steps"),
        ({"margin": -0.1}, "margin"),
        ({"alpha": 0}, "alpha"),
        ({"min_units": 0}, "min_units"),
        ({"min_units": 1.5}, "min_units"),
        ({"min_step_s": -1}, "min_step_s"),
        ({"audit_rate": 2}, "audit_rate"),
        ({"wieght": 0.1}, "wieght"),
    ],
)
def test_errors_name_the_field(change: dict[str, Any], param: str) -> None:
    with pytest.raises(FieldError) as caught:
        parse_plan({**BODY, **change}, "s")
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param}: ")


def test_a_body_that_is_no_object() -> None:
    with pytest.raises(FieldError, match="body"):
        parse_plan([1], "s")


def test_requests_are_units_over_weights() -> None:
    plan = Plan("a", {}, "s", steps=(0.1, 0.5), min_units=50)
    assert requests_for(plan, 30) == 300
    assert requests_for(plan, 50) == 500
    assert requests_for(plan, 150) == 500 + 200
    halved = Plan("a", {}, "s", steps=(0.1,), audit_rate=0.5)
    assert requests_for(halved, 50) == 1000


def test_the_estimate_is_what_then_happens() -> None:
    rng = random.Random(3)
    seen = [1 - rng.betavariate(0.64, 7.36) for _ in range(400)]
    plan = parse_plan({**BODY, "steps": [0.5], "min_step_s": 0}, "s")
    told = estimate(plan, seen)
    rollout = Rollout(plan, [m.name for m in METRICS], 0.0, SHORT)
    traffic(rollout, 3000, noisy(0.05))
    assert rollout.verdict is Verdict.ROLLED_BACK
    assert told["rollback_units"] / 3 < rollout.evidence.canary_units < told["rollback_units"] * 3
    assert told["rollback_requests"] == pytest.approx(2 * told["rollback_units"], abs=2)
    assert told["basis"] == "recent stable traffic"
    assert estimate(plan)["basis"] != "recent stable traffic"


# --- verdicts ---


def test_a_good_canary_climbs_its_steps_and_is_promoted() -> None:
    rollout = start()
    traffic(rollout, 6000, noisy())
    assert rollout.verdict is Verdict.PROMOTED
    assert [t.event for t in rollout.history] == ["started", "step", "promoted"]
    assert rollout.history[1].canary_units >= 50
    assert rollout.history[1].ts - rollout.history[0].ts >= 10
    assert rollout.weight == 1.0
    assert {rollout.arm(str(i)) for i in range(100)} == {"stable"}


def test_a_bad_canary_is_rolled_back_within_two_hundred_requests() -> None:
    rollout = start(steps=[0.5])
    now = traffic(rollout, 400, lambda arm: BAD if arm == "canary" else GOOD)
    assert rollout.verdict is Verdict.ROLLED_BACK
    assert now / 0.1 <= 200
    assert rollout.history[-1].reason.startswith("canary is worse: agreement")
    assert rollout.weight == 0.0
    assert {rollout.arm(str(i)) for i in range(100)} == {"stable"}


def test_a_canary_that_breaks_is_rolled_back_before_min_units() -> None:
    rollout = start(steps=[0.5], min_units=1000)
    traffic(rollout, 100, lambda arm: {**GOOD, "errors": float(arm == "canary")})
    assert rollout.verdict is Verdict.ROLLED_BACK
    assert "errors" in rollout.history[-1].reason


def test_late_drift_rolls_back() -> None:
    rollout = start(steps=[0.5], min_step_s=1e6)
    values, now = noisy(), 0.0
    now = traffic(rollout, 2000, values, now)
    assert rollout.verdict is Verdict.PROGRESSING
    traffic(rollout, 1500, noisy(0.08), now, prefix="late")
    assert rollout.verdict is Verdict.ROLLED_BACK


def test_steps_wait_for_units_and_for_time() -> None:
    quick = start(min_step_s=1000)
    traffic(quick, 1000, noisy(), gap_s=0.01)
    assert quick.step == 0
    few = start(min_units=100)
    now = traffic(few, 80, noisy(), gap_s=1)
    assert (few.step, few.evidence.canary_units < 100) == (0, True)
    traffic(few, 400, noisy(), now, gap_s=1, prefix="more")
    assert few.step == 1


def test_no_data_is_a_state_of_its_own_and_never_passes() -> None:
    rollout = start(steps=[0.5])
    for now in range(0, 2000, 10):
        rollout.tick(now)
    assert rollout.verdict is Verdict.NO_DATA
    assert rollout.active
    assert rollout.weight == 0.5
    traffic(rollout, 20, noisy(), 2000.0)
    assert rollout.verdict is Verdict.PROGRESSING
    assert [t.event for t in rollout.history] == ["started", "no_data", "data"]


def test_unproven_after_max_units_is_inconclusive_and_pauses() -> None:
    rollout = start(steps=[0.5], alpha=1e-6)
    rollout.limits = Limits(max_units=150)
    traffic(rollout, 2000, noisy(0.01))
    assert rollout.verdict is Verdict.INCONCLUSIVE
    assert rollout.paused
    assert rollout.weight == 0.5
    assert "agreement" in rollout.history[-1].reason
    rollout.resume(1e4)
    assert rollout.verdict is Verdict.PROGRESSING


def test_lost_audits_never_promote() -> None:
    rollout = start(steps=[0.5])
    rollout.limits = Limits(max_units=600)
    rng = random.Random(2)

    def values(arm: str) -> dict[str, float | None]:
        lost = arm == "canary" and rng.random() < 0.2
        return {**GOOD, "agreement": None if lost else 0.99, "mean_logp_large": None if lost else -0.1}

    traffic(rollout, 3000, values)  # type: ignore[arg-type]
    assert rollout.verdict in (Verdict.ROLLED_BACK, Verdict.INCONCLUSIVE)


def test_a_gate_may_veto() -> None:
    rollout = start(steps=[0.5], gated=True)
    traffic(rollout, 1500, noisy())
    assert rollout.waits_for_gate
    assert rollout.verdict is Verdict.PROGRESSING
    (vetoed,) = rollout.pass_gate(False, 1e4, "freeze")
    assert (vetoed.event, vetoed.verdict, vetoed.paused) == ("vetoed", "inconclusive", True)
    assert "freeze" in vetoed.reason
    rollout.resume(1e4)
    traffic(rollout, 200, noisy(), 1e4, prefix="again")
    (promoted,) = rollout.pass_gate(True, 2e4)
    assert promoted.event == "promoted"


# --- units ---


def test_a_key_counts_once_a_window_and_later_only_as_change() -> None:
    rollout = start(steps=[0.5])
    comparison = rollout.evidence.comparisons["agreement"]
    key = next(str(i) for i in range(100) if rollout.arm(str(i)) == "canary")
    other = next(str(i) for i in range(100) if rollout.arm(str(i)) == "stable")
    for unit, who, now in (("a", key, 1.0), ("b", other, 2.0)):
        assert rollout.admit(unit, rollout.arm(who), who, now, audited=True)
        rollout.observe(unit, GOOD, now)
    wealth = comparison.harm.value
    assert wealth != 1.0
    assert not rollout.admit("c", "canary", key, 3.0, audited=True)
    for unit, who, now in (("d", key, 1001.0), ("e", other, 1002.0)):
        assert rollout.admit(unit, rollout.arm(who), who, now, audited=True)
        rollout.observe(unit, BAD if who == key else GOOD, now)
    assert comparison.harm.value == wealth
    assert comparison.returning_cusum.value > 1.2
    assert rollout.evidence.comparisons["errors"].units == {"stable": 1, "canary": 1}


def test_a_key_whose_answer_is_still_out_is_not_counted_again() -> None:
    rollout = start(steps=[0.5])
    assert rollout.admit("a", "canary", "k", 1.0, audited=True)
    assert not rollout.admit("b", "canary", "k", 1500.0, audited=True)
    rollout.observe("a", GOOD, 1501.0)
    assert rollout.admit("c", "canary", "k", 2500.0, audited=True)


def test_what_is_not_audited_counts_for_the_rest() -> None:
    rollout = start(steps=[0.5])
    rollout.admit("a", "canary", "k", 1.0, audited=False)
    rollout.observe("a", {**GOOD, "agreement": None}, 1.0)
    evidence = rollout.evidence.comparisons
    assert (evidence["agreement"].units["canary"], evidence["errors"].units["canary"]) == (0, 1)
    # Its first audited answer, a window later, is the first observation of its agreement.
    rollout.admit("b", "canary", "k", 1500.0, audited=True)
    rollout.observe("b", GOOD, 1500.0)
    assert (evidence["agreement"].units["canary"], evidence["errors"].units["canary"]) == (1, 1)


def test_speed_is_measured_against_stable() -> None:
    rollout = start(steps=[0.5], min_step_s=1e6)
    traffic(rollout, 1500, lambda arm: {**GOOD, "ttft": 2.0 if arm == "canary" else 0.2})
    assert rollout.verdict is Verdict.ROLLED_BACK
    assert "ttft" in rollout.history[-1].reason


def test_scores_count() -> None:
    rollout = start(steps=[0.5], min_step_s=1e6)
    for i in range(200):
        for arm in ("stable", "canary"):
            rollout.score(f"{arm}{i}", arm, "solved", float(arm == "stable"))
    rollout.tick(1.0)
    assert "score:solved" in rollout.history[-1].reason


def test_acceptance_is_compared_only_where_both_verify() -> None:
    assert "acceptance" in comparable_metrics(True, True)
    assert "acceptance" not in comparable_metrics(True, False)


# --- people ---


def test_pause_resume_abort_promote() -> None:
    rollout = start()
    assert rollout.pause(1.0).event == "paused"
    assert rollout.weight == 0.25
    for now in range(0, 5000, 100):
        rollout.tick(now)
    assert rollout.verdict is Verdict.PROGRESSING
    with pytest.raises(WrongState, match="paused"):
        rollout.pause(2.0)
    assert rollout.resume(3.0).event == "resumed"
    with pytest.raises(WrongState):
        rollout.resume(3.0)
    assert rollout.abort(4.0).verdict == "aborted"
    assert rollout.weight == 0.0
    for act in (rollout.pause, rollout.resume, rollout.abort, rollout.promote):
        with pytest.raises(WrongState, match="ended"):
            act(5.0)
    other = start()
    assert other.promote(1.0).verdict == "promoted"
    assert other.weight == 1.0


def test_harm_rolls_back_even_while_paused() -> None:
    rollout = start(steps=[0.5])
    rollout.pause(0.0)
    for i in range(400):
        arm = rollout.arm(str(i))
        rollout.admit(str(i), arm, None, 1.0, audited=True)
        rollout.observe(str(i), BAD if arm == "canary" else GOOD, 1.0)
        rollout.tick(1.0)
    assert rollout.verdict is Verdict.ROLLED_BACK


# --- restarts ---


def reload(rollout: Rollout) -> Rollout:
    return Rollout.from_dict(json.loads(json.dumps(rollout.to_dict())))


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 120), st.sampled_from([0.0, 0.1]))
def test_a_restart_anywhere_changes_nothing(at: int, drop: float) -> None:
    def replay(restart: bool) -> dict[str, Any]:
        rollout, rng, now = start(steps=[0.5]), random.Random(9), 0.0
        for i in range(160):
            if restart and i == at:
                rollout = reload(rollout)
            now += 0.5
            key = f"k{i % 90}"
            arm = rollout.arm(key)
            rollout.admit(str(i), arm, key if i % 2 else None, now, audited=True)
            if i >= 3:
                values = {**GOOD, "agreement": rng.random() - (drop if arm == "canary" else 0)}
                rollout.observe(str(i - 3), values, now)
            rollout.tick(now)
        return rollout.summary()

    assert replay(True) == replay(False)


def test_what_a_crash_left_unanswered_is_missing() -> None:
    rollout = start(steps=[0.5])
    for unit, arm in (("a", "stable"), ("b", "canary")):
        rollout.admit(unit, arm, None, 0.0, audited=True)
    rollout.observe("a", GOOD, 1.0)
    after = reload(rollout)
    after.units.lose_pending()
    assert after.evidence.comparisons["agreement"].missing == {"stable": 0, "canary": 1}
    assert after.evidence.comparisons["agreement"].harm.value > 1


def test_the_summary_is_the_contracts() -> None:
    rollout = start()
    traffic(rollout, 300, noisy())
    summary = json.loads(json.dumps(rollout.summary()))
    assert {"name", "verdict", "paused", "weight", "step", "units", "evidence", "salt", "history"} <= set(
        summary
    )
    assert set(summary["units"]) == {"stable", "canary"}
    assert {"against", "for", "limit"} <= set(summary["evidence"]["agreement"])
    assert summary["evidence"]["agreement"]["limit"] == 20


@pytest.mark.soak
def test_sticky_users_through_the_whole_path() -> None:
    """200 users with means N(.1, .06), 3,000 requests in windows, request by request: no false rollbacks."""
    rolled_back = 0
    for run in range(60):
        rng = random.Random(run)
        means = [min(max(rng.gauss(0.1, 0.06), 0.0), 1.0) for _ in range(200)]
        plan = Plan("a", {}, f"salt{run}", steps=(0.5,), min_step_s=1e9)
        rollout = Rollout(plan, ["agreement"], 0.0, Limits(window_s=200.0, no_data_s=1e9))
        for i in range(3000):
            user = rng.randrange(200)
            arm = rollout.arm(f"u{user}")
            rollout.admit(str(i), arm, f"u{user}", float(i), audited=True)
            wrong = sum(rng.random() < means[user] for _ in range(64))
            rollout.observe(str(i), {"agreement": 1 - wrong / 64}, float(i))
            if i % 10 == 0:
                rollout.tick(float(i))
        rolled_back += rollout.verdict is Verdict.ROLLED_BACK
    assert rolled_back <= 3

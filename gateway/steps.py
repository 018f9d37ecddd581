"""Rows of the tape, built from what the engine knows when a token is settled."""

from __future__ import annotations

from typing import Any

from msgspec.structs import asdict, replace

from gateway.core import MIDDLES, MiddleView, Outcome, Reason, Signals, Step, Tier, TopK, Verdict
from gateway.policy import Decision, Policy, State
from gateway.row import PassStamp, Proposal, Row
from gateway.sampling import Reading


def proposal_step(row: Row, p: Proposal, outcome: Outcome, large: Reading | None) -> Step:
    """A proposal that stood, was rejected, or was not examined; large: what the large model says there."""
    step = new_step(row, p.token, p.tier, outcome, p.decision, p.state, p.stamp)
    said = {} if large is None else _large_view(p.token, _judged(p), large)
    return replace(
        step,
        **proposed(p),
        **said,
        small_kv=p.small_kv,
        large_kv=p.large_kv,
        middle=p.middle,
        decision_no=p.decision_no,
        overruled_by=Tier.LARGE if outcome is Outcome.REJECTED and large is not None else None,
    )


def recovered_step(row: Row, rejected: Proposal, large: Reading, stamp: PassStamp) -> Step:
    """The large model's token where a draft was rejected; the small model's signals are the draft's."""
    step = new_step(row, large.token, Tier.LARGE, Outcome.RECOVERED, None, rejected.state, stamp)
    return replace(step, **proposed(rejected), **_large_view(large.token, rejected.small_choice, large))


def overruled_step(row: Row, rejected: Proposal, by: MiddleView) -> Step:
    """A draft that a middle tier rejected: the large model has not seen it."""
    step = proposal_step(row, replace(rejected, middle=(*rejected.middle, by)), Outcome.REJECTED, None)
    return replace(step, overruled_by=by.tier)


def large_step(row: Row, large: Reading, stamp: PassStamp) -> Step:
    """The token at the position where the round ended: bonus after a full draft, else deferred."""
    p = row.deferred
    state, decision, no = undecided(row)
    middle = middle_passed(row) if p is None else p.middle
    last = middle[-1].reason if middle else decision.reason if decision is not None else None
    outcome = Outcome.BONUS if last is Reason.DRAFT_FULL and row.drafts else Outcome.LARGE
    step = new_step(row, large.token, Tier.LARGE, outcome, decision, state, stamp)
    small = None if p is None else p.small_choice
    said = {} if p is None else proposed(p)
    return replace(step, **said, **_large_view(large.token, small, large), middle=middle, decision_no=no)


def bonus_step(row: Row, large: Reading, stamp: PassStamp) -> Step:
    """The token behind a deferred one that rode along and stood: nobody was asked to decide there."""
    state = row.history.state(None, row.draft_limit(Tier.SMALL))
    step = new_step(row, large.token, Tier.LARGE, Outcome.BONUS, None, state, stamp)
    return replace(step, **_large_view(large.token, None, large))


def undecided(row: Row) -> tuple[State, Decision | None, int | None]:
    """What the lowest level decided where the round ended, in which state; nothing where it was not asked,
    because drafts were full further up, or where what it looked up has a row of its own."""
    if row.deferred is not None:
        return row.deferred.state, row.deferred.decision, row.deferred.decision_no
    if row.passed and row.passed[0].tier is Tier.SMALL:
        return row.passed[0].state, row.passed[0].decision, row.passed[0].decision_no
    return row.history.state(None, row.draft_limit(Tier.SMALL)), None, None


def middle_passed(row: Row) -> tuple[MiddleView, ...]:
    """The middle tiers' decisions where the round ended without a proposal."""
    return tuple(
        middle_view(row, p.tier, Verdict.PASSED, None, None, p.decision, p.state, p.decision_no, 0)
        for p in row.passed
        if p.tier is not Tier.SMALL
    )


def middle_view(
    row: Row,
    tier: Tier,
    verdict: Verdict,
    token: int | None,
    said: Reading | None,
    decision: Decision | None,
    state: State,
    decision_no: int | None,
    pass_id: int,
) -> MiddleView:
    """What a middle tier said of a token, if it was asked, and decided, if it had to."""
    columns = decided(row.policies[tier], decision)
    p = None if said is None else said.p_token if token == said.token else said.p_draft
    return MiddleView(
        tier=tier,
        verdict=verdict,
        choice=None if said is None else said.token,
        p=p,
        signals=None if said is None else said.signals,
        topk=None if said is None else said.topk,
        action=columns["action"],
        reason=columns["reason"],
        score=columns["score"],
        threshold=columns["threshold"],
        draft_pos=state.draft_pos,
        draft_limit=state.draft_limit,
        run_length=state.run_length,
        ema_acceptance=state.ema_acceptance,
        guard_value=state.guard_value,
        probe_u=state.probe_u,
        fact_value=state.fact_value,
        decision_no=decision_no,
        pass_id=pass_id,
    )


def new_step(
    row: Row,
    token: int,
    tier: Tier,
    outcome: Outcome,
    decision: Decision | None,
    state: State,
    stamp: PassStamp,
) -> Step:
    """The next row of a choice, without either model's view."""
    policy, score = row.request.policy, None if decision is None else decision.score
    step = Step(
        request_id=row.request.id,
        choice=row.request.choice,
        seq=row.seq,
        round=row.round,
        tick=stamp.tick,
        token_id=token,
        token_bytes=row.tokenizer.token_bytes(token),
        tier=tier,
        action=None if decision is None else decision.action,
        reason=None if decision is None else decision.reason,
        score=score,
        threshold=None if score is None else policy.threshold,
        propensity=None if decision is None else _propensity(policy, decision),
        idx=state.idx,
        draft_pos=state.draft_pos,
        draft_limit=state.draft_limit,
        run_length=state.run_length,
        guard_value=state.guard_value,
        ema_acceptance=state.ema_acceptance,
        large_used=state.large_used,
        probe_u=state.probe_u,
        fact_value=state.fact_value,
        signals=None,
        small_choice=None,
        small_topk=None,
        large_topk=None,
        p_large=None,
        large_choice=None,
        outcome=outcome,
        audit_agrees=None,
        audit_source=None,
        pass_id=stamp.pass_id,
        batch_rows=stamp.rows,
        small_kv=row.seen[Tier.SMALL],
        large_kv=row.seen[Tier.LARGE],
        latency_us=stamp.latency_us,
        ts=stamp.ts,
    )
    row.seq += 1
    return step


def decided(policy: Policy, decision: Decision | None) -> dict[str, Any]:
    """The columns of a decision; null where a token was written without one."""
    if decision is None:
        return {"action": None, "reason": None, "score": None, "threshold": None, "propensity": None}
    return {
        "action": decision.action,
        "reason": decision.reason,
        "score": decision.score,
        "threshold": None if decision.score is None else policy.threshold,
        "propensity": _propensity(policy, decision),
    }


def _propensity(policy: Policy, decision: Decision) -> float | None:
    """How likely the verdict was of a position that might have been probed; None where it might not."""
    if not policy.probe_rate or decision.reason not in (Reason.PROBE, Reason.CONFIDENT):
        return None
    return policy.probe_rate if decision.reason is Reason.PROBE else 1 - policy.probe_rate


def state_columns(state: State) -> dict[str, Any]:
    """The columns that hold what the rules knew of the past."""
    return asdict(state)


def small_view(token: int, signals: Signals, topk: TopK) -> dict[str, Any]:
    """What the small model says at a position."""
    return {"signals": signals, "small_choice": token, "small_topk": topk}


def proposed(p: Proposal) -> dict[str, Any]:
    """What the small model said where a token was proposed; nothing, where it has not spoken."""
    if p.small_choice is None or p.signals is None or p.topk is None:
        return {}
    return small_view(p.small_choice, p.signals, p.topk)


def _judged(p: Proposal) -> int | None:
    """The token that the large model's view is a label of: the small model's, or a middle tier's own."""
    return p.token if p.tier in MIDDLES else p.small_choice


def _large_view(token: int, judged: int | None, large: Reading) -> dict[str, Any]:
    """What the large model says of a row's token, and whether the token it is judged by is its own."""
    agrees = None if judged is None else judged == large.token
    return {
        "large_topk": large.topk,
        "large_choice": large.token,
        "large_signals": large.signals,
        "p_large": large.p_token if token == large.token else large.p_draft,
        "audit_agrees": agrees,
        "audit_source": None if agrees is None else "verify",
    }

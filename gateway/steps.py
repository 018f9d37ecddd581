"""Rows of the tape, built from what the engine knows when a token is settled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gateway.core import Outcome, Reason, Signals, Step, Tier, TopK
from gateway.policy import Decision, Policy, State
from gateway.row import PassStamp, Proposal, Row
from gateway.sampling import Reading


def proposal_step(row: Row, p: Proposal, outcome: Outcome, large: Reading | None) -> Step:
    """A proposal that stood, was rejected, or was not examined; large: what the large model says there."""
    step = new_step(row, p.token, p.tier, outcome, p.decision, p.state, p.stamp)
    step = replace(step, **proposed(p), small_kv=p.small_kv, large_kv=p.large_kv)
    return step if large is None else replace(step, **_large_view(p.token, p, large))


def recovered_step(row: Row, rejected: Proposal, large: Reading, stamp: PassStamp) -> Step:
    """The large model's token where a draft was rejected; the small model's signals are the draft's."""
    step = new_step(row, large.token, Tier.LARGE, Outcome.RECOVERED, None, rejected.state, stamp)
    return replace(step, **proposed(rejected), **_large_view(large.token, rejected, large))


def large_step(row: Row, large: Reading, stamp: PassStamp) -> Step:
    """The token at the position where the round ended: bonus after a full draft, else deferred."""
    p = row.deferred
    if p is not None:
        decision, state = p.decision, p.state
    elif row.early is not None:
        decision, state = row.early
    else:
        raise AssertionError("a large pass ended a round that nobody ended")
    outcome = Outcome.BONUS if decision.reason is Reason.DRAFT_FULL and row.drafts else Outcome.LARGE
    step = new_step(row, large.token, Tier.LARGE, outcome, decision, state, stamp)
    step = replace(step, **_large_view(large.token, p, large))
    return step if p is None else replace(step, **proposed(p))


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
    step = Step(
        request_id=row.request.id,
        choice=row.request.choice,
        seq=row.seq,
        round=row.round,
        tick=stamp.tick,
        token_id=token,
        token_bytes=row.tokenizer.token_bytes(token),
        tier=tier,
        **decided(row.request.policy, decision),
        **state_columns(state),
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
    propensity = None
    if policy.probe_rate and decision.reason in (Reason.PROBE, Reason.CONFIDENT):
        propensity = policy.probe_rate if decision.reason is Reason.PROBE else 1 - policy.probe_rate
    return {
        "action": decision.action,
        "reason": decision.reason,
        "score": decision.score,
        "threshold": None if decision.score is None else policy.threshold,
        "propensity": propensity,
    }


def state_columns(state: State) -> dict[str, Any]:
    """The columns that hold what the rules knew of the past."""
    return {name: getattr(state, name) for name in State.__dataclass_fields__}


def small_view(token: int, signals: Signals, topk: TopK) -> dict[str, Any]:
    """What the small model says at a position."""
    return {"signals": signals, "small_choice": token, "small_topk": topk}


def proposed(p: Proposal) -> dict[str, Any]:
    """What the small model said with a proposal; nothing, where the lookup made it."""
    if p.signals is None or p.topk is None:
        return {}
    return small_view(p.token, p.signals, p.topk)


def _large_view(token: int, proposal: Proposal | None, large: Reading) -> dict[str, Any]:
    """What the large model says of a row's token, and whether the small model's own would have been it."""
    agrees = None if proposal is None or proposal.signals is None else proposal.token == large.token
    return {
        "large_topk": large.topk,
        "large_choice": large.token,
        "large_signals": large.signals,
        "p_large": large.p_token if token == large.token else large.p_draft,
        "audit_agrees": agrees,
        "audit_source": None if agrees is None else "verify",
    }

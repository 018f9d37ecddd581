"""What a written step learns later: the small model's signals, the large model's view."""

from __future__ import annotations

from typing import Any

from gateway.core import MIDDLES, Step
from gateway.policy import History, decide
from gateway.row import Row
from gateway.sampling import Reading
from gateway.steps import decided, small_view, state_columns


def signal(row: Row, seq: int, reading: Reading) -> Step:
    """A written step learns what the small model says at its position."""
    learnt = small_view(reading.token, reading.signals, reading.topk)
    large = row.open[seq].large_choice
    if large is not None and row.open[seq].tier not in MIDDLES:
        learnt |= {"audit_agrees": reading.token == large, "audit_source": "verify"}
    if row.shadowed is not None:
        learnt |= _shadow(row, row.shadowed, row.open[seq], reading)
    return row.restate(seq, **learnt)


def label(row: Row, seq: int, reading: Reading) -> Step:
    """A written step learns what the large model says at its position."""
    step = row.open[seq]
    judged = step.token_id if step.tier in MIDDLES else step.small_choice
    learnt: dict[str, Any] = {
        "large_topk": reading.topk,
        "large_choice": reading.token,
        "large_signals": reading.signals,
        "p_large": reading.p_draft,
        "audit_source": "catchup" if row.finished is None else "posthoc",
    }
    if judged is not None:
        learnt["audit_agrees"] = judged == reading.token
    return row.restate(seq, **learnt)


def _shadow(row: Row, history: History, step: Step, reading: Reading) -> dict[str, Any]:
    """What routing would have decided here, had the text been the same."""
    policy = row.request.policy
    left = row.most_tokens - history.num_written
    limit = min(policy.draft_length, max(1, left - 1)) if policy.verified else policy.draft_length
    fact = row.fact_value(step.idx, reading.token)
    state = history.state(reading.token, limit, row.probe_u(step.idx), fact)
    decision = decide(policy, state, reading.signals)
    history.shadow(decision, reading.token, step.token_id)
    return {**decided(policy, decision), **state_columns(state), "audit_source": "shadow"}

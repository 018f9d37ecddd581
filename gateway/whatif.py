"""What-if: the decisions other settings would have taken along a recorded answer.

Exact until a flipped decision would have changed the text; from there on the small model would have read
another prefix, so decisions and shares are an estimate. Under `exact` the text cannot change, so every
decision stays exact. Pure: gateway.policy over columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from msgspec import structs

from gateway.core import UNWRITTEN, Accept, Action, Mode, Outcome, Reason, Tier
from gateway.intervals import wilson
from gateway.policy import MAY_RIDE, Decision, History, Policy, State, decide, decide_early, decide_lookup
from gateway.recorded import Rows
from gateway.replay import recorded_policy

NUM_BINS = 20
"""Score bins of equal width over [0, 1], in which labels are pooled."""


@dataclass(frozen=True, slots=True)
class Labels:
    """Audited proposals by score bin: how many there are, and how many the large model agreed with.

    Weighted by 1/propensity, so that what was probed at random counts for what it stands for.
    """

    total: tuple[float, ...] = (0.0,) * NUM_BINS
    agreed: tuple[float, ...] = (0.0,) * NUM_BINS

    @staticmethod
    def bin(score: float) -> int:
        """The bin of a routing score in [0, 1]."""
        return min(NUM_BINS - 1, int(score * NUM_BINS))


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the overrides would do to this answer.

    kept_share, recorded_kept_share: kept decisions over all decisions, with the overrides and as recorded.
    agreement: expected share of kept tokens that are the large model's own choice, with a 95 % interval
    [low, high] from `labels` audited tokens in the same score bins; None where a bin has none.
    """

    kept_share: float | None
    recorded_kept_share: float | None
    agreement: float | None
    low: float | None
    high: float | None
    labels: int


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Decisions by output position; the reason is None where nobody would be asked, behind a deferred token
    that rode along. flips: positions whose action differs from the recorded one.
    exact_until: first position whose decision is an estimate, None if all are exact. unknown: positions that
    cannot be decided (the small model said nothing there); they keep their recorded action.
    """

    first_flip: int | None
    flips: list[int]
    decisions: list[dict[str, Any]]
    exact_until: int | None
    unknown: list[int]
    estimate: Estimate


@dataclass(frozen=True, slots=True)
class _Position:
    """One output position: the row that decided it and the row that was written (often the same)."""

    decided: int
    written: int


def what_if(
    request_row: Mapping[str, Any], steps: pa.Table, policy: Policy, labels: Labels | None = None
) -> WhatIf:
    """One choice under another policy: its requests row, its steps (recorded.COLUMNS, in seq order).

    Raises replay.UnknownPolicy where the recorded policy cannot be read.
    """
    recorded = recorded_policy(request_row["policy"])
    rows = Rows(steps)
    history = History(policy)
    found = _Answer()
    for position in _positions(rows):
        i = position.decided
        action = rows.action[i]
        if action is None and rows.outcome[i] is not Outcome.BONUS:
            # A fork's given token: nobody decided it.
            _push_given(history, rows, position.written)
            continue
        if action is None and found.may_ride:
            # Behind a deferred token that rode along nobody is asked.
            found.pass_by(rows.idx[i])
            _push_given(history, rows, position.written)
            continue
        action = action or Action.DEFER
        limit = _limit(rows, i, recorded, policy)
        decision, proposal = _decide(rows, i, policy, history, limit)
        if decision is None:
            found.unknown.append(rows.idx[i])
            decision = Decision(action, rows.reason[i])
        same = _same_token(rows, position, decision, recorded, policy)
        found.add(rows.idx[i], action, decision, same)
        _push(history, rows, position, decision, proposal)
    flips = found.flips
    return WhatIf(
        first_flip=flips[0] if flips else None,
        flips=flips,
        decisions=found.decisions,
        exact_until=found.exact_until,
        unknown=found.unknown,
        estimate=_estimate(found, labels or Labels()),
    )


class _Answer:
    """What is found on the way along the path."""

    def __init__(self) -> None:
        self.flips: list[int] = []
        self.decisions: list[dict[str, Any]] = []
        self.unknown: list[int] = []
        self.exact_until: int | None = None
        self.kept: list[float | None] = []
        self.num_recorded_kept = 0

    @property
    def may_ride(self) -> bool:
        """Whether the token of the position before would be deferred and could ride along."""
        return bool(self.decisions) and self.decisions[-1]["reason"] in MAY_RIDE

    def pass_by(self, idx: int) -> None:
        """The large model's token, without a decision."""
        self.decisions.append({"idx": idx, "action": Action.DEFER.value, "reason": None, "score": None})

    def add(self, idx: int, action: Action, decision: Decision, same_token: bool) -> None:
        """A decision; action: the recorded one."""
        self.decisions.append(
            {
                "idx": idx,
                "action": decision.action.value,
                "reason": getattr(decision.reason, "value", decision.reason),
                "score": decision.score,
            }
        )
        self.num_recorded_kept += action is Action.KEEP
        if decision.action is Action.KEEP:
            self.kept.append(decision.score)
        if decision.action is not action:
            self.flips.append(idx)
        if not same_token and self.exact_until is None:
            self.exact_until = idx + 1


def _positions(rows: Rows) -> list[_Position]:
    """The output positions in order. A recovered token was decided by the draft it replaced."""
    positions: list[_Position] = []
    rejected: dict[int, int] = {}
    for i in range(rows.count):
        outcome = rows.outcome[i]
        if outcome is Outcome.REJECTED:
            rejected[rows.idx[i]] = i
        elif outcome is Outcome.RECOVERED:
            positions.append(_Position(rejected.get(rows.idx[i], i), i))
        elif outcome not in UNWRITTEN:
            positions.append(_Position(i, i))
    return positions


def _limit(rows: Rows, i: int, recorded: Policy, policy: Policy) -> int:
    """The draft limit as it would have been: a cap below the recorded policy's own length still caps."""
    limit: int = rows.draft_limit[i]
    return policy.draft_length if limit >= recorded.draft_length else min(limit, policy.draft_length)


def _decide(
    rows: Rows, i: int, policy: Policy, history: History, limit: int
) -> tuple[Decision | None, int | None]:
    """The decision there and the token it is about; no decision where the small model said nothing."""
    if rows.tier[i] is Tier.LOOKUP:
        state = _state(rows, i, history, rows.token_id[i], limit)
        looked_up = decide_lookup(policy, state)
        if looked_up is not None:
            return looked_up, rows.token_id[i]
    proposal = rows.small_choice[i]
    state, signals = _state(rows, i, history, proposal, limit), rows.signals(i)
    if signals is not None and not policy.can_score(signals):
        signals = None
    return decide_early(policy, state) if signals is None else decide(policy, state, signals), proposal


def _state(rows: Rows, i: int, history: History, proposal: int | None, limit: int) -> State:
    state = history.state(proposal, limit, rows.probe_u[i], rows.fact_value[i])
    if proposal is None and rows.token_id[i] is None:
        # Capture level `signals`: n-grams cannot be counted again, so the recorded count stands.
        return structs.replace(state, guard_value=rows.guard_value[i])
    return state


def _same_token(
    rows: Rows, position: _Position, decision: Decision, recorded: Policy, policy: Policy
) -> bool:
    """Whether the recorded token would have been written under this decision; False where that is unknown."""
    written, decided = position.written, position.decided
    by_large = rows.tier[written] is Tier.LARGE or _agrees(rows, written)
    if decision.action is Action.DEFER or policy.mode in (Mode.SHADOW, Mode.LARGE_ONLY):
        return by_large
    looked_up = decision.reason is Reason.LOOKUP_HIT
    if (policy.verified and policy.accept is Accept.EXACT) or (looked_up and policy.accept is Accept.TRUST):
        # Nothing stands there but the large model's own token.
        return by_large
    same_rule = replace(recorded, mode=policy.mode) if recorded.mode is Mode.SHADOW else recorded
    if (
        policy.verified
        and rows.action[decided] is Action.KEEP
        and _accept_of(policy) == _accept_of(same_rule)
    ):
        return True
    # Kept unverified, or kept under a rule that lets the small model's token stand where both agree.
    by_small = rows.tier[written] is not Tier.LARGE or _agrees(rows, decided)
    return by_small and (by_large or not policy.verified)


def _agrees(rows: Rows, i: int) -> bool:
    """Whether both models' own tokens at row i are the same, as far as the row says."""
    x = rows.token_id[i] if rows.tier[i] is not Tier.LARGE else rows.small_choice[i]
    y = rows.large_choice[i]
    if x is not None and y is not None:
        return bool(x == y)
    return rows.audit_agrees[i] is True


def _accept_of(policy: Policy) -> tuple[Any, ...]:
    return policy.verified, policy.accept, policy.accept_threshold, policy.alpha


def _push(
    history: History, rows: Rows, position: _Position, decision: Decision, proposal: int | None
) -> None:
    written = rows.token_id[position.written]
    if written is None or proposal is None:
        # Without token ids any will do, as long as they are equal where the proposal was written.
        written = written or 0
        recovered = position.written != position.decided
        own = rows.tier[position.written] is Tier.SMALL or decision.reason is Reason.LOOKUP_HIT
        differs = rows.audit_agrees[position.decided] is False and not own
        proposal = -1 if recovered or differs else written
    if decision.reason is Reason.BUDGET:
        history.keep(written)
    elif decision.reason is Reason.LOOKUP_HIT:
        # Looked-up tokens wait for verification under every accept rule, `trust` too.
        history.draft(proposal)
        if proposal != written:
            history.resolve(history.num_drafts - 1, written)
    else:
        history.shadow(decision, proposal, written)


def _push_given(history: History, rows: Rows, i: int) -> None:
    token = rows.token_id[i] or 0
    if rows.tier[i] is Tier.LARGE:
        # What these settings would have drafted before it stands: the text is the recorded one.
        history.resolve(history.num_drafts, token)
    else:
        history.keep(token)


def _estimate(found: _Answer, labels: Labels) -> Estimate:
    count = len(found.decisions)
    agreement, low, high, num_labels = expected_agreement(found.kept, labels)
    return Estimate(
        kept_share=len(found.kept) / count if count else None,
        recorded_kept_share=found.num_recorded_kept / count if count else None,
        agreement=agreement,
        low=low,
        high=high,
        labels=num_labels,
    )


def expected_agreement(
    scores: Sequence[float | None], labels: Labels
) -> tuple[float | None, float | None, float | None, int]:
    """(agreement, low, high, labels): the labels' agreement, weighted by how many scores fall into each bin.

    The 95 % interval is Wilson's at the effective number of labels, 1 / sum(w^2 / n). All None where a bin
    that is needed has no label; kept tokens without a score (lookup, mode) are left out.
    """
    weights = [0.0] * NUM_BINS
    for score in scores:
        if score is not None:
            weights[Labels.bin(score)] += 1.0
    used = [b for b in range(NUM_BINS) if weights[b]]
    num_labels = int(sum(labels.total[b] for b in used))
    if not used or any(not labels.total[b] for b in used):
        return None, None, None, num_labels
    total = sum(weights)
    agreement = sum(weights[b] / total * labels.agreed[b] / labels.total[b] for b in used)
    effective = 1.0 / sum((weights[b] / total) ** 2 / labels.total[b] for b in used)
    low, high = wilson(agreement, effective)
    return agreement, low, high, num_labels

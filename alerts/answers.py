"""What one answer says about quality: its steps folded into the metrics of losses.METRICS."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.core import (
    MIDDLES,
    UNWRITTEN,
    Action,
    AuditStatus,
    Finished,
    FinishReason,
    Mode,
    Outcome,
    Reason,
    Step,
    Tier,
)
from gateway.policy import f32
from gateway.request import Request, Trace

_FLOOR = -10.0
"""Least log probability a single token may count with, nats."""

_SCORED = frozenset({Reason.CONFIDENT, Reason.LOW_CONFIDENCE})
_PROPOSERS = frozenset({Tier.SMALL, *MIDDLES})
_PROPOSED = frozenset({Outcome.KEPT, Outcome.ACCEPTED, Outcome.REJECTED})


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished answer.

    values: by metric name, None where missing. judged: see is_judged. small_share: of the output tokens, None
    where load capped the drafts.
    decisions: (kept, score minus threshold) of each scored one. worst: 0 good, 1 bad, to pick examples by.
    """

    request_id: str
    arm: str
    values: Mapping[str, float | None]
    judged: bool
    small_share: float | None
    decisions: tuple[tuple[bool, float], ...]
    finished: float
    worst: float


@dataclass(frozen=True, slots=True)
class Row:
    """What the metrics read of a step. same: whether its token is the large model's own; None: not said."""

    seq: int
    tier: Tier
    action: Action | None
    reason: Reason | None
    score: float | None
    threshold: float | None
    outcome: Outcome
    p_large: float | None
    same: bool | None

    @classmethod
    def of(cls, step: Step) -> Row:
        """A step as the engine tells it."""
        same = None if step.large_choice is None else step.token_id == step.large_choice
        if step.overruled_by in MIDDLES:
            # The large model was not asked any more.
            same = False
        return cls(
            step.seq, step.tier, step.action, step.reason, step.score, step.threshold, step.outcome,
            step.p_large, same,
        )  # fmt: skip


@dataclass(slots=True)
class _Open:
    request: Request
    # seq -> whether the large model chose the same token (None: it has not said)
    proposals: dict[int, bool | None] = field(default_factory=dict)
    logps: dict[int, float | None] = field(default_factory=dict)
    decisions: dict[int, tuple[bool, float]] = field(default_factory=dict)
    lost: bool = False


class Answers:
    """Choices under way, folded step by step."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], _Open] = {}

    def admit(self, request: Request) -> None:
        """A choice begins."""
        self._open[request.id, request.choice] = _Open(request)

    def step(self, step: Step) -> None:
        """A new or restated row; one of an unknown choice is ignored."""
        self.row(step.request_id, step.choice, Row.of(step))

    def row(self, request_id: str, choice_no: int, row: Row) -> None:
        """The same, of a step that may have been read from a tape."""
        choice = self._open.get((request_id, choice_no))
        if choice is None:
            return
        if row.reason in _SCORED and row.score is not None and row.threshold is not None:
            choice.decisions[row.seq] = (row.action is Action.KEEP, row.score - f32(row.threshold))
        if row.tier in _PROPOSERS and row.outcome in _PROPOSED:
            choice.proposals[row.seq] = row.same
        if row.outcome not in UNWRITTEN:
            choice.logps[row.seq] = log(row.p_large) if row.p_large is not None else None

    def finish(self, trace: Trace) -> Answer | None:
        """The choice is complete, its audit included; None for one that was never admitted."""
        choice = self._open.pop((trace.request.id, trace.request.choice), None)
        if choice is None or trace.finished is None:
            return None
        values = _values(choice, trace.finished, trace.audit)
        counts = trace.finished.counts
        total = counts.completion_tokens
        agreement = values["agreement"]
        return Answer(
            request_id=trace.request.id,
            arm=trace.request.arm,
            values=values,
            judged=is_judged(trace.request),
            small_share=counts.small_tokens / total if total and not counts.adapted else None,
            decisions=tuple(choice.decisions.values()),
            finished=trace.finished.timings.finished or trace.finished.timings.received,
            worst=1.0 if agreement is None else 1.0 - agreement,
        )

    def lose(self, request_id: str, choice: int) -> None:
        """Rows of this choice were lost: what it says of agreement is missing."""
        if (request_id, choice) in self._open:
            self._open[request_id, choice].lost = True

    def __len__(self) -> int:
        return len(self._open)


def log(p: float) -> float:
    """The natural logarithm of a probability, at least _FLOOR."""
    return max(math.log(p), _FLOOR) if p > 0 else _FLOOR


def is_judged(request: Request) -> bool:
    """Whether the large model will have examined every token of this answer: known at admission.

    Verified policies are labelled as they decode; what they keep unverified once a token budget is spent
    needs an audit, as everything does under `trust` and `small_only`.
    """
    policy = request.policy
    if request.audited or policy.mode is Mode.LARGE_ONLY:
        return True
    return policy.verified and policy.large_token_budget is None


def _values(choice: _Open, finished: Finished, audit: AuditStatus) -> dict[str, float | None]:
    counts, times = finished.counts, finished.timings
    total = counts.completion_tokens
    end = times.finished if times.finished is not None else times.received
    failed = finished.reason is FinishReason.ERROR
    # A lost audit is missing as a whole; where the client left, only the tokens that were never labelled.
    unaudited = audit is AuditStatus.LOST and finished.reason is not FinishReason.ABORT
    lost = failed or choice.lost or unaudited
    agreement: float | None = None
    mean_logp: float | None = None
    if not lost:
        agreed_not = sum(same is not True for same in choice.proposals.values())
        agreement = 1.0 - agreed_not / total if total else 1.0
        logps = [_FLOOR if logp is None else logp for logp in choice.logps.values()]
        mean_logp = sum(logps) / len(logps) if logps else 0.0
    # Without a first token the wait so far is what the client knows.
    first = times.first_token if times.first_token is not None else end
    seconds = max(end - times.received, 1e-6)
    drafted = counts.num_draft_tokens
    return {
        "agreement": agreement,
        "mean_logp_large": mean_logp,
        "acceptance": counts.num_accepted_draft_tokens / drafted if drafted else 1.0,
        "guard_hits": counts.guard_hits / total if total else 0.0,
        "errors": float(failed),
        "length": float(total) if not failed else None,
        "ttft": max(first - times.received, 0.0) if not failed else None,
        "tokens_per_s": total / seconds if not failed else None,
    }

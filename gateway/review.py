"""What a middle tier makes of one position: it judges the draft, then decides as the small model does."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import structs

from gateway.accept import accepts
from gateway.core import Action, MiddleView, Reason, Step, Tier, Verdict
from gateway.policy import Decision, decide
from gateway.row import PassStamp, Proposal, Row
from gateway.sampling import Reading
from gateway.steps import middle_passed, middle_view, overruled_step, undecided


@dataclass(frozen=True, slots=True)
class Reviewed:
    """proposal: the token that now stands for the position, decided by the middle tier. stood: whether it is
    the draft. overruled: the step of the draft otherwise, where there was one."""

    proposal: Proposal
    decision: Decision
    stood: bool
    overruled: Step | None

    @property
    def kept(self) -> bool:
        """Whether it may go on to the next tier, or stands at once under `trust`."""
        return self.decision.action is Action.KEEP


def review(row: Row, tier: Tier, draft: Proposal | None, said: Reading, stamp: PassStamp) -> Reviewed:
    """One position, the next that the history has no token for; `draft` stood at the tier below.

    Accept rules hold between neighbours: x is the draft, y the middle tier's own token.
    """
    policy = row.policies[tier]
    stood = draft is not None and accepts(policy, draft.token, said)
    if draft is not None:
        row.history.examined(row.below(tier), stood)
    token = draft.token if draft is not None and stood else said.token
    position = len(row.history.tokens)
    state = row.history.state(
        token, row.draft_limit(tier), row.probe_u(position), row.fact_value(position, token), tier
    )
    decision = decide(policy, state, said.signals)

    def view(verdict: Verdict, decided: Decision | None) -> MiddleView:
        no = None if decided is None else row.number()
        of = draft.token if verdict is Verdict.REJECTED and draft is not None else token
        return middle_view(row, tier, verdict, of, said, decided, state, no, stamp.pass_id)

    overruled = None
    if draft is None:
        proposal = _own(row, tier, said, stamp)
        full = bool(row.passed) and row.passed[-1].decision.reason is Reason.DRAFT_FULL
        verdict = Verdict.BONUS if full else Verdict.OWN
    elif stood:
        proposal, verdict = draft, Verdict.ACCEPTED
    else:
        overruled = overruled_step(row, draft, view(Verdict.REJECTED, None))
        proposal = structs.replace(
            draft, tier=tier, token=token, decision=None, decision_no=None, middle=(), stamp=stamp,
            small_kv=row.seen[Tier.SMALL], large_kv=row.seen[Tier.LARGE],
        )  # fmt: skip
        verdict = Verdict.RECOVERED
    proposal = structs.replace(proposal, middle=(*proposal.middle, view(verdict, decision)))
    return Reviewed(proposal, decision, stood, overruled)


def _own(row: Row, tier: Tier, said: Reading, stamp: PassStamp) -> Proposal:
    """The middle tier's own token where the tiers below ended their round."""
    state, decision, no = undecided(row)
    under = row.deferred
    return Proposal(
        tier=tier,
        token=said.token,
        small_choice=None if under is None else under.small_choice,
        signals=None if under is None else under.signals,
        topk=None if under is None else under.topk,
        state=state,
        decision=decision,
        stamp=stamp,
        small_kv=row.seen[Tier.SMALL],
        large_kv=row.seen[Tier.LARGE],
        decision_no=no,
        middle=middle_passed(row) if under is None else under.middle,
    )

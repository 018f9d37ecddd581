"""A row's rounds: the small model proposes, drafts gather, the large model verifies and writes one token.

With middle tiers the same happens at each level: a tier verifies the drafts of the one below, adds a token of
its own, and decides which of these go on as drafts for the tier above it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import structs

from gateway.accept import num_accepted
from gateway.commit import write
from gateway.core import Action, Mode, Outcome, Reason, Step, Tick, Tier
from gateway.labels import label, signal
from gateway.load import Load
from gateway.lookup import AnswerStore, NgramIndex
from gateway.policy import MAY_RIDE, Decision, decide, decide_lookup
from gateway.review import review
from gateway.row import Output, PassStamp, Proposal, Row
from gateway.sampling import Reading
from gateway.steps import bonus_step, large_step, new_step, proposal_step, recovered_step, small_view

UNVERIFIED = frozenset({Reason.BUDGET, Reason.DEGRADED})
"""Rules that let the small model's token stand although the policy verifies."""

View = tuple[int, Reading]
"""An output position and what a model says there."""


class Rounds:
    """Decides what becomes of each row after a pass. rows: all that are in the engine; load and answers as
    for the engine."""

    def __init__(
        self,
        rows: Sequence[Row],
        load: Load | None,
        answers: AnswerStore | None,
        clock: Callable[[], float],
        *,
        ride_along: bool,
        guesses: bool,
    ) -> None:
        self.rows = rows
        self.load = load
        self.answers = answers
        self.clock = clock
        self.ride_along = ride_along
        self.guesses = guesses
        self.num_decoding = 0

    def count(self) -> None:
        """Take stock of the rows whose client still waits: once a tick, not for each of its rows."""
        self.num_decoding = sum(row.finished is None for row in self.rows)

    def begin(self, row: Row, out: Output, tick: Tick) -> None:
        """A row's first round; a fork's given tokens are written before it.

        What the models say of those is filled in by their first passes.
        """
        mode = row.request.policy.mode
        stamp = PassStamp(tick.number, 0, 0, 0, self.clock())
        for token, tier in row.request.forced:
            state = row.history.state(None, row.draft_limit(Tier.SMALL))
            step = new_step(row, token, tier, Outcome.FORCED, None, state, stamp)
            if tier is Tier.LARGE:
                row.history.resolve(0, token)
            else:
                row.history.keep(token)
            row.append(token)
            row.owe(step, signals=mode.runs_small, label=True)
            self._write(row, step, out, tick)
            if row.finished is not None:
                return
        self._route(row, tick)

    def after(
        self, tier: Tier, row: Row, views: list[View], stamp: PassStamp, out: Output, tick: Tick
    ) -> None:
        """A tier has spoken: at positions already written, and where it was asked what comes next."""
        if tier is Tier.SMALL:
            self._after_small(row, views, stamp, out, tick)
        elif tier is Tier.LARGE:
            self._after_large(row, views, stamp, out, tick)
        else:
            self._after_middle(tier, row, [reading for _, reading in views], stamp, out, tick)

    def degrade(self, row: Row, tick: Tick) -> None:
        """The large model cannot be had: what waits for it is given up, the small model writes on."""
        self.discard(row, row.drafts, tick)
        row.history.abandon()
        row.drop_drafts(0)
        row.read_again()
        row.degraded = row.counts.degraded = True
        self._route(row, tick)

    def discard(self, row: Row, drafts: list[Proposal], tick: Tick) -> None:
        """Record what was proposed behind the last position that counts, the deferred proposal included."""
        late = [*drafts, row.deferred] if row.deferred is not None else drafts
        tick.steps.extend(proposal_step(row, p, Outcome.DISCARDED, None) for p in late)

    # ---- what comes next

    def _route(self, row: Row, tick: Tick) -> None:
        """Decide the next position as far as that needs no model; look up what may be drafted for free."""
        policy = row.request.policy
        if self.load is not None and policy.mode is Mode.ROUTED:
            row.load_cap = self.load.cap_for(self.num_decoding, row.num_unseen(Tier.SMALL), row.num_left)
            row.counts.adapted |= row.load_cap < policy.draft_length
        row.route()
        waiting = row.history.num_waiting(Tier.SMALL)
        if row.lookup is not None and not waiting and self._look_up(row, row.lookup, tick):
            row.route()
        if row.protects and not row.ahead:
            row.guesses = self._num_guesses(row)
            row.tier = Tier.SMALL if row.guesses else Tier.LARGE

    def _num_guesses(self, row: Row) -> int:
        """How many protected tokens the small model should say ahead, to ride along: where they are the large
        model's own, one pass writes them all, up to the last one. The first token waits for nothing."""
        policy, position = row.request.policy, len(row.history.tokens)
        if not row.rides or not self.guesses or not position or row.load_cap == 0:
            return 0
        pays = policy.draft_length if self.load is None else self.load.guess_cap(self.num_decoding)
        return max(0, min(pays, min(policy.protect_first, row.most_tokens) - position - 1))

    def _look_up(self, row: Row, index: NgramIndex, tick: Tick) -> bool:
        """Draft what followed the last tokens before, while the rules allow it; whether there was any."""
        policy, history = row.request.policy, row.history
        if row.degraded:
            return False
        most = min(policy.draft_length, row.room(Tier.SMALL) - 1)
        if self.load is not None:
            most = min(most, self.load.lookup_cap(self.num_decoding))
        if most < 1:
            return False
        # Behind a short match the small model drafts on, where it may; else a longer draft is worth the risk.
        per_match = 1 if row.follows_lookup and row.load_cap != 0 else 2
        tokens = index.propose(row.sequence, most, per_match)
        if not tokens and self.answers is not None:
            tokens = self.answers.propose(row.request.scope, row.sequence, most, per_match)
        stamp = PassStamp(tick.number, 0, 0, 0, self.clock())
        for token in tokens:
            position = len(history.tokens)
            state = history.state(token, most, row.probe_u(position))
            decision = decide_lookup(policy, state)
            if decision is None or not row.permits(token):
                break
            if row.ahead:
                row.read_again()
            seen, no = row.seen, row.number()
            row.drafts.append(
                Proposal(
                    Tier.LOOKUP, token, None, None, None, state, decision, stamp,
                    seen[Tier.SMALL], seen[Tier.LARGE], no,
                )
            )  # fmt: skip
            history.draft(token)
            row.append(token)
        return bool(history.num_waiting(Tier.SMALL))

    # ---- the small model has spoken

    def _after_small(self, row: Row, views: list[View], stamp: PassStamp, out: Output, tick: Tick) -> None:
        for position, reading in views:
            seq = row.unsignalled.pop(position, None)
            if seq is not None:
                tick.restated.append(signal(row, seq, reading))
            elif row.finished is not None:
                continue
            elif row.history.num_written <= position < len(row.history.tokens):
                # A draft that passed the small model by; it waits further up.
                i = position - row.history.num_written
                row.drafts[i] = structs.replace(
                    row.drafts[i], small_choice=reading.token, signals=reading.signals, topk=reading.topk
                )
            elif row.flying or row.guesses:
                if position == len(row.history.tokens) + len(row.ahead):
                    row.ahead.append((reading, stamp))
                    if len(row.ahead) == row.guesses:
                        row.guesses, row.tier = 0, Tier.LARGE
            elif position == len(row.history.tokens):
                self._propose(row, reading, stamp, out, tick)

    def _propose(self, row: Row, reading: Reading, stamp: PassStamp, out: Output, tick: Tick) -> None:
        policy = row.request.policy
        position = len(row.history.tokens)
        fact = row.fact_value(position, reading.token)
        state = row.history.state(reading.token, row.draft_limit(Tier.SMALL), row.probe_u(position), fact)
        decision = decide(policy, state, reading.signals)
        proposal = Proposal(
            Tier.SMALL,
            reading.token,
            reading.token,
            reading.signals,
            reading.topk,
            state,
            decision,
            stamp,
            row.seen[Tier.SMALL],
            row.seen[Tier.LARGE],
            row.number(),
        )
        if self.load is not None and policy.mode is Mode.ROUTED:
            self.load.saw_proposal(decision.action is Action.KEEP)
        if decision.action is Action.KEEP:
            row.append(proposal.token)
        elif not row.ahead and (row.drafts_ahead or self._may_ride(row, decision)):
            row.ahead.append((reading, stamp))
        self._go_on(Tier.SMALL, row, proposal, decision, out, tick)
        if row.finished is None and decision.action is Action.KEEP:
            self._route(row, tick)

    def _may_ride(self, row: Row, decision: Decision) -> bool:
        """Whether the large model should read the deferred token along with the drafts: where it writes the
        same, it has read one token more in the same pass and writes that one too."""
        policy, history = row.request.policy, row.history
        budget = policy.large_token_budget
        return (
            row.rides
            and self.ride_along
            and decision.reason in MAY_RIDE
            and len(history.tokens) + 2 <= row.most_tokens
            and (budget is None or history.large_used + 2 <= budget)
            and (self.load is None or self.load.ride_pays(self.num_decoding))
        )

    def _go_on(
        self, tier: Tier, row: Row, proposal: Proposal, decision: Decision, out: Output, tick: Tick
    ) -> None:
        """A tier has decided: the proposal waits for the next one, stands at once, or ends the round."""
        row.counts.guard_hits += decision.reason in (Reason.LOOP_GUARD, Reason.FACT_GUARD)
        if decision.action is Action.DEFER:
            row.tier, row.passed = row.above(tier), []
            if proposal.tier is Tier.LOOKUP:
                # Its row must say what was looked up, which that of the token written there cannot.
                tick.steps.append(proposal_step(row, proposal, Outcome.DISCARDED, None))
            else:
                row.deferred = proposal
        elif row.request.policy.verified and decision.reason not in UNVERIFIED:
            row.drafts.append(proposal)
            row.history.draft(proposal.token, tier)
        else:
            row.history.keep(proposal.token)
            step = proposal_step(row, proposal, Outcome.KEPT, None)
            row.owe(step, signals=step.signals is None, label=True)
            self._write(row, step, out, tick)

    # ---- a middle tier has spoken

    def _after_middle(
        self, tier: Tier, row: Row, readings: list[Reading], stamp: PassStamp, out: Output, tick: Tick
    ) -> None:
        below = row.below(tier)
        num = row.history.num_waiting(below)
        if row.finished is not None or len(readings) != num + 1:
            return
        kept, drafts = row.drafts[: len(row.drafts) - num], row.drafts[len(row.drafts) - num :]
        start = len(row.sequence) - num
        row.drafts = kept
        row.history.recall(below)
        for i, reading in enumerate(readings):
            draft = drafts[i] if i < num else None
            reviewed = review(row, tier, draft, reading, stamp)
            if reviewed.overruled is not None:
                tick.steps.append(reviewed.overruled)
            if reviewed.stood and reviewed.kept:
                self._go_on(tier, row, reviewed.proposal, reviewed.decision, out, tick)
                if row.finished is None:
                    continue
                self.discard(row, drafts[i + 1 :], tick)
                row.cut(start + i + 1)
                return
            if draft is not None:
                self.discard(row, drafts[i + 1 :], tick)
                row.cut(start + i)
            row.deferred = None
            if reviewed.kept:
                row.append(reviewed.proposal.token)
            self._go_on(tier, row, reviewed.proposal, reviewed.decision, out, tick)
            if row.finished is None and reviewed.kept:
                self._route(row, tick)
            return

    # ---- the large model has spoken

    def _after_large(self, row: Row, views: list[View], stamp: PassStamp, out: Output, tick: Tick) -> None:
        rest = []
        for position, reading in views:
            seq = row.unlabelled.pop(position, None)
            if seq is None:
                rest.append(reading)
            else:
                tick.restated.append(label(row, seq, reading))
        if row.finished is None and len(rest) == len(row.drafts) + 1 + row.riders:
            self._resolve(row, rest, stamp, out, tick)

    def _resolve(self, row: Row, readings: list[Reading], stamp: PassStamp, out: Output, tick: Tick) -> None:
        """Accept a prefix of the drafts, then write the large model's own token behind it, and one more for
        each token that rode along and was just that."""
        drafts = list(row.drafts)
        num = num_accepted(row.request.policy, [d.token for d in drafts], readings)
        if drafts:
            row.counts.num_drafts += 1
            row.counts.num_draft_tokens += len(drafts)
            if self.load is not None:
                self.load.saw_verified(drafts[0].tier, num, min(num + 1, len(drafts)))
        for i in range(num):
            row.counts.num_accepted_draft_tokens += 1
            step = proposal_step(row, drafts[i], Outcome.ACCEPTED, readings[i])
            row.owe(step, signals=step.signals is None, label=False)
            self._write(row, step, out, tick)
            if row.finished is not None:
                self.discard(row, drafts[i + 1 :], tick)
                row.history.resolve(i + 1, None)
                row.drop_drafts(i + 1)
                return
        large = readings[num]
        if num < len(drafts):
            tick.steps.append(proposal_step(row, drafts[num], Outcome.REJECTED, large))
            self.discard(row, drafts[num + 1 :], tick)
            step = recovered_step(row, drafts[num], large, stamp)
            row.history.resolve(num, large.token)
            row.drop_drafts(num)
            self._write_own(row, step, out, tick)
        else:
            self._write_on(row, readings[num:], stamp, out, tick)
        row.round += 1
        if row.finished is None:
            self._route(row, tick)
        while row.finished is None and row.tier is Tier.SMALL and row.ahead:
            self._propose(row, *row.ahead[0], out, tick)

    def _write_on(self, row: Row, readings: list[Reading], stamp: PassStamp, out: Output, tick: Tick) -> None:
        """All drafts stood: the large model's own token, and while that rode along, its next."""
        for i, large in enumerate(readings):
            if i:
                row.route()
            protected = row.protects
            step = large_step(row, large, stamp) if protected or not i else bonus_step(row, large, stamp)
            small, rode = row.ahead[0][0] if row.ahead else None, row.riders > 0
            if small is not None and step.signals is None:
                step = structs.replace(
                    step,
                    **small_view(small.token, small.signals, small.topk),
                    audit_agrees=small.token == large.token,
                    audit_source="verify",
                )
            num = len(row.drafts)
            row.history.resolve(num, large.token)
            row.drop_drafts(num)
            self._write_own(row, step, out, tick)
            if small is None or not rode:
                return
            stands = small.token == large.token
            if self.load is not None:
                self.load.saw_rider(stands, guessed=protected)
            if not stands or row.finished is not None:
                return

    def _write_own(self, row: Row, step: Step, out: Output, tick: Tick) -> None:
        """A token of the large model's that the history has already."""
        row.append(step.token_id)
        lacks = step.signals is None and row.request.policy.mode.runs_small
        row.owe(step, signals=lacks and step.reason is not Reason.LOAD, label=False)
        self._write(row, step, out, tick)

    def _write(self, row: Row, step: Step, out: Output, tick: Tick) -> None:
        write(row, step, out, tick, self.clock)

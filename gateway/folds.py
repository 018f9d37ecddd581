"""A choice's rows folded as the engine decided them, each decision compared with what its inputs give."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import structs

from gateway.core import MIDDLES, MODELS, Action, Outcome, Reason, Signals, Tier, Verdict
from gateway.policy import Decision, History, Policy, State, decide, decide_early, decide_lookup
from gateway.recorded import Rows

Found = tuple[int, str, Any, Any]
"""(row, column, recorded, recomputed)."""


def fold(policy: Policy, rows: Rows, shadow: bool) -> tuple[int, list[Found]]:
    """How many decisions the rows hold, and what of them does not follow from their inputs."""
    if any(rows.middle) or any(no is not None for no in rows.decision_no):
        return _Cascade(policy, rows).run()
    by_row = _Shadow(policy, rows) if shadow else _Written(policy, rows)
    decisions, found = 0, list[Found]()
    for i in range(rows.count):
        if rows.action[i] is not None and by_row.decides(i):
            decisions += 1
            # A limit that is missing is already among what is found.
            found += by_row.compare(i) if rows.draft_limit[i] is not None else ()
        by_row.push(i)
    return decisions, found


def _lacking(policy: Policy, signals: Signals | None) -> str:
    """The column without which the policy cannot decide; empty where nothing is missing."""
    if signals is None:
        return "gap"
    return "" if policy.can_score(signals) else "hidden"


class _Written:
    """The fold of a choice whose text routing wrote."""

    def __init__(self, policy: Policy, rows: Rows) -> None:
        self.policy = policy
        self.rows = rows
        self.history = History(policy)
        self.accepted = 0
        self.blind = False

    def decides(self, i: int) -> bool:
        return True

    def compare(self, i: int) -> Iterable[Found]:
        rows = self.rows
        if rows.draft_limit[i] < 0:
            # The large model was given up, and with it the drafts that waited for it.
            self.history.abandon()
        if rows.tier[i] is Tier.LOOKUP:
            return self._compare_lookup(i)
        proposal = rows.small_choice[i]
        state = self.history.state(proposal, rows.draft_limit[i], rows.probe_u[i], rows.fact_value[i])
        guard = state.guard_value
        signals = rows.signals(i)
        lacking = _lacking(self.policy, signals)
        if signals is None or lacking or guard != rows.guard_value[i]:
            early = decide_early(self.policy, state)
            if early is not None:
                # Decided before the small model spoke, so no n-gram was looked up.
                return _differences(rows, i, state, 0.0, early)
            if signals is None or lacking:
                return [(i, lacking, None, "needed to decide")]
            if proposal is None or self.blind:
                guard = rows.guard_value[i]
                state = structs.replace(state, guard_value=guard)
        return _differences(rows, i, state, guard, decide(self.policy, state, signals))

    def _compare_lookup(self, i: int) -> Iterable[Found]:
        rows = self.rows
        state = self.history.state(rows.token_id[i], rows.draft_limit[i], rows.probe_u[i])
        if rows.token_id[i] is None or self.blind:
            state = structs.replace(state, guard_value=rows.guard_value[i])
        decision = decide_lookup(self.policy, state)
        if decision is None:
            return [(i, "action", rows.action[i], None)]
        return _differences(rows, i, state, state.guard_value, decision)

    def push(self, i: int) -> None:
        rows, outcome = self.rows, self.rows.outcome[i]
        token = rows.token_id[i]
        if token is None:
            # Without token ids (capture level `signals`) any will do: guard values are the recorded ones.
            self.blind, token = True, 0
        if outcome is Outcome.ACCEPTED:
            self.history.draft(token)
            self.accepted += 1
        elif outcome is Outcome.KEPT:
            self.history.keep(token)
        elif outcome is Outcome.REJECTED or outcome is Outcome.DISCARDED:
            # A deferred proposal behind a rejection never became a draft.
            if rows.action[i] is Action.KEEP:
                self.history.draft(token)
        elif outcome is Outcome.FORCED and rows.tier[i] is not Tier.LARGE:
            self.history.keep(token)
        else:
            self.history.resolve(self.accepted, token)
            self.accepted = 0


class _Shadow:
    """The fold of a choice that the large model wrote while routing was only imagined (mode `shadow`)."""

    def __init__(self, policy: Policy, rows: Rows) -> None:
        self.policy = policy
        self.rows = rows
        self.history = History(policy)

    def decides(self, i: int) -> bool:
        # Until the small model has read a position, its row says no more than that the mode defers.
        return self.rows.reason[i] is not Reason.MODE

    def compare(self, i: int) -> Iterable[Found]:
        rows = self.rows
        signals = rows.signals(i)
        lacking = _lacking(self.policy, signals)
        if signals is None or lacking:
            return [(i, lacking, None, "needed to decide")]
        state = self.history.state(
            rows.small_choice[i], rows.draft_limit[i], rows.probe_u[i], rows.fact_value[i]
        )
        if rows.small_choice[i] is None:
            state = structs.replace(state, guard_value=rows.guard_value[i])
        return _differences(rows, i, state, state.guard_value, decide(self.policy, state, signals))

    def push(self, i: int) -> None:
        rows, action, reason = self.rows, self.rows.action[i], self.rows.reason[i]
        if action is None or reason is None or not self.decides(i):
            return
        written, proposal = rows.token_id[i], rows.small_choice[i]
        if written is None or proposal is None:
            written, proposal = 0, 0 if rows.audit_agrees[i] else 1
        self.history.shadow(Decision(action, reason), proposal, written)


class _Cascade(_Written):
    """The fold of a choice that middle tiers decided about as well.

    Rows lie on the tape as they were settled, which is not the order in which the tiers decided: within a
    round of the large model that order is the decisions' own number, and the large model's word comes last.
    """

    def run(self) -> tuple[int, list[Found]]:
        """Every decision of every tier compared."""
        decisions, found = 0, list[Found]()
        for *_, i, level in sorted(self._events(), key=lambda event: event[:4]):
            if level is None:
                self.push(i)
            elif level < 0:
                decisions += 1
                found += self.compare(i) if self.rows.draft_limit[i] is not None else ()
                self._push_lowest(i)
            else:
                decisions += 1
                found += self._compare_view(i, level)
                self._push_view(i, level)
        return decisions, found

    def _events(self) -> Iterator[tuple[int, int, int, int, int | None]]:
        """(round, phase, number, row, level): level -1 is the lowest tier's decision, 0 and up a view's, None
        what became of the row in the end."""
        rows = self.rows
        for i in range(rows.count):
            if rows.outcome[i] is Outcome.FORCED:
                yield -1, 0, i, i, None
                continue
            if rows.action[i] is not None:
                yield _known_no(rows.round[i]), 0, _known_no(rows.decision_no[i]), i, -1
            for level, view in enumerate(rows.middle[i]):
                if view.action is not None:
                    yield _known_no(rows.round[i]), 0, _known_no(view.decision_no), i, level
            yield _known_no(rows.round[i]), 1, i, i, None

    def push(self, i: int) -> None:
        """What the large model made of a row, or that it was given."""
        rows, outcome = self.rows, self.rows.outcome[i]
        if outcome is Outcome.ACCEPTED:
            self.accepted += 1
        elif outcome is Outcome.FORCED or outcome in (Outcome.RECOVERED, Outcome.BONUS, Outcome.LARGE):
            token = self._known(rows.token_id[i])
            if outcome is Outcome.FORCED and rows.tier[i] is not Tier.LARGE:
                self.history.keep(token)
            else:
                self.history.resolve(self.accepted, token)
                self.accepted = 0

    def _push_lowest(self, i: int) -> None:
        rows = self.rows
        if rows.action[i] is not Action.KEEP:
            return
        stands = rows.outcome[i] is Outcome.KEPT and not rows.middle[i]
        (self.history.keep if stands else self.history.draft)(self._token(i, -1))

    def _push_view(self, i: int, level: int) -> None:
        rows, view = self.rows, self.rows.middle[i][level]
        if view.action is not Action.KEEP:
            return
        if rows.outcome[i] is Outcome.KEPT and level == len(rows.middle[i]) - 1:
            self.history.keep(self._token(i, level))
        else:
            self.history.draft(self._token(i, level), view.tier)

    def _compare_view(self, i: int, level: int) -> Iterable[Found]:
        view, history = self.rows.middle[i][level], self.history
        if view.tier not in MIDDLES:
            return [(i, "middle.tier", view.tier, "a middle tier")]
        below = MODELS[MODELS.index(view.tier) - 1]
        history.recall(below)
        if view.verdict in (Verdict.ACCEPTED, Verdict.RECOVERED):
            history.examined(below, view.verdict is Verdict.ACCEPTED)
        if view.draft_limit is None:
            # Already among what is found.
            return ()
        policy = self.policy.at(view.tier)
        asked = view.verdict is not Verdict.PASSED
        token = self._token(i, level) if asked else None
        state = history.state(token, view.draft_limit, view.probe_u, view.fact_value, view.tier)
        if asked and self.blind:
            state = structs.replace(state, guard_value=view.guard_value)
        if asked and view.signals is None:
            return [(i, f"{view.tier}.gap", None, "needed to decide")]
        decision = decide(policy, state, view.signals) if view.signals else decide_early(policy, state)
        expected = {
            "draft_pos": state.draft_pos,
            "run_length": state.run_length,
            "guard_value": state.guard_value,
            "ema_acceptance": state.ema_acceptance,
            "action": None if decision is None else decision.action,
            "reason": None if decision is None else decision.reason,
            "score": None if decision is None else decision.score,
        }
        return [
            (i, f"{view.tier}.{name}", recorded, value)
            for name, value in expected.items()
            if (recorded := getattr(view, name)) != value
        ]

    def _token(self, i: int, level: int) -> int:
        """The token that a tier decided about."""
        rows = self.rows
        if level >= 0:
            view = rows.middle[i][level]
            return self._token(i, level - 1) if view.verdict is Verdict.ACCEPTED else self._known(view.choice)
        return self._known(rows.token_id[i] if rows.tier[i] is Tier.LOOKUP else rows.small_choice[i])

    def _known(self, token: int | None) -> int:
        """Without token ids (capture level `signals`) any will do: guard values are the recorded ones."""
        self.blind |= token is None
        return token or 0


def _known_no(number: int | None) -> int:
    """A number to sort by; one that is missing makes decisions mismatch, not replay fail."""
    return -1 if number is None else number


def _differences(rows: Rows, i: int, state: State, guard: float, decision: Decision) -> Iterable[Found]:
    if (
        state.idx == rows.idx[i]
        and state.draft_pos == rows.draft_pos[i]
        and state.run_length == rows.run_length[i]
        and guard == rows.guard_value[i]
        and state.ema_acceptance == rows.ema_acceptance[i]
        and state.large_used == rows.large_used[i]
        and decision.action is rows.action[i]
        and decision.reason is rows.reason[i]
        and decision.score == rows.score[i]
    ):
        return ()
    expected = {
        "idx": state.idx,
        "draft_pos": state.draft_pos,
        "run_length": state.run_length,
        "guard_value": guard,
        "ema_acceptance": state.ema_acceptance,
        "large_used": state.large_used,
        "action": decision.action,
        "reason": decision.reason,
        "score": decision.score,
    }
    return [
        (i, name, recorded, value)
        for name, value in expected.items()
        if (recorded := getattr(rows, name)[i]) != value
    ]

"""Decision replay: recompute every recorded decision from its recorded inputs, and those from earlier rows.

Pure: folds gateway.policy.History over a choice's rows, as the engine did while it decoded, and compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from gateway.core import Accept, Action, Mode, Outcome, Reason, Signals, Tier
from gateway.policy import Decision, History, Policy, State, decide, decide_early, decide_lookup, f32

COLUMNS = (
    "idx", "seq", "draft_pos", "token_id", "tier", "action", "reason", "score", "threshold", "top1_p",
    "gap", "entropy", "attn_entropy", "hidden", "run_length", "ema_acceptance", "draft_limit", "guard_value",
    "large_used", "probe_u", "fact_value", "small_choice", "large_choice", "outcome", "audit_agrees",
)  # fmt: skip
"""The columns of `steps` that replay reads."""

EXAMINED = (Outcome.ACCEPTED, Outcome.REJECTED)


class UnknownPolicy(ValueError):
    """A recorded policy has settings that this version does not know."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One recorded value that is not what its inputs give. column `seq`: a row is missing or doubled."""

    request_id: str
    choice: int
    seq: int
    idx: int
    column: str
    recorded: Any
    recomputed: Any

    def __str__(self) -> str:
        where = f"{self.request_id} choice {self.choice} row {self.seq} (position {self.idx})"
        return f"{where}: {self.column} is {self.recorded!r}, its inputs give {self.recomputed!r}"


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """How many decisions were recomputed, and what did not match."""

    decisions: int
    mismatches: list[Mismatch] = field(default_factory=list)


def recorded_policy(settings: Mapping[str, Any]) -> Policy:
    """The policy as a requests row holds it; settings an older version lacked take their defaults.

    Raises UnknownPolicy for settings this version does not know: it could not decide as they say.
    """
    try:
        return Policy.of(settings)
    except ValueError as error:
        raise UnknownPolicy(f"the recorded policy cannot be followed: {error}") from None


def replay(request_row: Mapping[str, Any], steps: pa.Table) -> ReplayResult:
    """Replay one choice: its requests row (policy as a mapping) and its rows of steps in seq order.

    steps needs COLUMNS. Rows without token ids (capture level `signals`) replay with their recorded
    guard values. Raises UnknownPolicy.
    """
    policy = recorded_policy(request_row["policy"])
    rows = Rows(steps)
    found = _consistency(policy, rows)
    fold = _Shadow(policy, rows) if policy.mode is Mode.SHADOW else _Written(policy, rows)
    decisions = 0
    for i in range(rows.count):
        if rows.action[i] is not None and fold.decides(i):
            decisions += 1
            # A limit that is missing is already among what is found.
            found += fold.compare(i) if rows.draft_limit[i] is not None else ()
        fold.push(i)
    request_id, choice = request_row["request_id"], request_row["choice"]
    return ReplayResult(
        decisions,
        [
            Mismatch(request_id, choice, rows.seq[i], rows.idx[i], column, recorded, recomputed)
            for i, column, recorded, recomputed in sorted(found, key=lambda entry: entry[0])
        ],
    )


def replay_all(choices: Iterable[tuple[Mapping[str, Any], pa.Table]]) -> Iterator[ReplayResult]:
    """Replay choice after choice, as `Reader.every_choice(COLUMNS)` gives them; one at a time in memory."""
    for request_row, steps in choices:
        yield replay(request_row, steps)


Found = tuple[int, str, Any, Any]
"""(row, column, recorded, recomputed)."""


class Rows:
    """The columns of one choice as Python lists, one entry a row; what is not recorded is None."""

    def __init__(self, steps: pa.Table) -> None:
        self.count = steps.num_rows
        self.idx = _numbers(steps, "idx")
        self.seq = _numbers(steps, "seq")
        self.draft_pos = _numbers(steps, "draft_pos")
        self.token_id = _numbers(steps, "token_id")
        self.score = _numbers(steps, "score")
        self.threshold = _numbers(steps, "threshold")
        self.top1_p = _numbers(steps, "top1_p")
        self.gap = _numbers(steps, "gap")
        self.entropy = _numbers(steps, "entropy")
        self.attn_entropy = _numbers(steps, "attn_entropy")
        self.hidden: list[bytes | None] = steps["hidden"].to_pylist()
        self.run_length = _numbers(steps, "run_length")
        self.ema_acceptance = _numbers(steps, "ema_acceptance")
        self.draft_limit = _numbers(steps, "draft_limit")
        self.guard_value = _numbers(steps, "guard_value")
        self.large_used = _numbers(steps, "large_used")
        self.probe_u = _numbers(steps, "probe_u")
        self.fact_value = _numbers(steps, "fact_value")
        self.small_choice = _numbers(steps, "small_choice")
        self.large_choice = _numbers(steps, "large_choice")
        self.tier = _members(steps, "tier", Tier)
        self.action = _members(steps, "action", Action)
        self.reason = _members(steps, "reason", Reason)
        self.outcome = _members(steps, "outcome", Outcome)
        self.audit_agrees: list[bool | None] = steps["audit_agrees"].to_pylist()

    def signals(self, i: int) -> Signals | None:
        """What the small model said at row i, if it has spoken."""
        top1_p, gap, entropy = self.top1_p[i], self.gap[i], self.entropy[i]
        if gap is None or entropy is None or top1_p is None:
            return None
        return Signals(top1_p, gap, entropy, self.attn_entropy[i], self.hidden[i])


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
                state = replace(state, guard_value=guard)
        return _differences(rows, i, state, guard, decide(self.policy, state, signals))

    def _compare_lookup(self, i: int) -> Iterable[Found]:
        rows = self.rows
        state = self.history.state(rows.token_id[i], rows.draft_limit[i], rows.probe_u[i])
        if rows.token_id[i] is None or self.blind:
            state = replace(state, guard_value=rows.guard_value[i])
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
            state = replace(state, guard_value=rows.guard_value[i])
        return _differences(rows, i, state, state.guard_value, decide(self.policy, state, signals))

    def push(self, i: int) -> None:
        rows, action, reason = self.rows, self.rows.action[i], self.rows.reason[i]
        if action is None or reason is None or not self.decides(i):
            return
        written, proposal = rows.token_id[i], rows.small_choice[i]
        if written is None or proposal is None:
            written, proposal = 0, 0 if rows.audit_agrees[i] else 1
        self.history.shadow(Decision(action, reason), proposal, written)


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


def _consistency(policy: Policy, rows: Rows) -> list[Found]:
    """What needs no fold: no row missing, tokens are those of the tier that wrote them, `exact` was exact."""
    found: list[Found] = []
    # Under `trust` only looked-up tokens are examined, and they need the large model's own token.
    exact = policy.accept in (Accept.EXACT, Accept.TRUST)
    threshold = f32(policy.threshold)
    columns = zip(
        rows.seq, rows.tier, rows.outcome, rows.token_id, rows.small_choice, rows.large_choice,
        rows.score, rows.threshold, rows.draft_limit, strict=True,
    )  # fmt: skip
    for i, (seq, tier, outcome, token, x, y, score, limit, drafts) in enumerate(columns):
        if seq != i:
            found.append((i, "seq", seq, i))
        if drafts is None or drafts > policy.draft_length:
            found.append((i, "draft_limit", drafts, policy.draft_length))
        if score is not None and limit != threshold:
            found.append((i, "threshold", limit, threshold))
        if not isinstance(outcome, Outcome):
            found.append((i, "outcome", outcome, "one of the tape's outcomes"))
        if outcome is Outcome.FORCED or token is None:
            continue
        if tier is Tier.LARGE:
            if y is not None and token != y:
                found.append((i, "token_id", token, y))
        elif tier is Tier.SMALL and token != x:
            found.append((i, "token_id", token, x))
        elif not isinstance(tier, Tier):
            found.append((i, "tier", tier, "small, large or lookup"))
        elif (
            exact and y is not None and outcome in EXAMINED and (outcome is Outcome.ACCEPTED) != (token == y)
        ):
            found.append((i, "outcome", outcome, "accepted" if token == y else "rejected"))
    return found


def _numbers(steps: pa.Table, name: str) -> list[Any]:
    column = steps[name]
    if column.null_count == column.length():
        return [None] * column.length()
    values: list[Any] = (
        column.fill_null(0).to_numpy().tolist() if column.null_count else column.to_numpy().tolist()
    )
    if column.null_count:
        for i in np.flatnonzero(column.is_null().to_numpy()).tolist():
            values[i] = None
    return values


def _members(steps: pa.Table, name: str, of: type[Any]) -> list[Any]:
    """A text column as members of its enumeration; a value outside of it stays text, and so mismatches."""
    known = {member.value: member for member in of}
    encoded = steps[name].combine_chunks().dictionary_encode()
    members = [known.get(value, value) for value in encoded.dictionary.to_pylist()]
    indices = encoded.indices
    if indices.null_count:
        members.append(None)
        indices = indices.fill_null(len(members) - 1)
    return [members[i] for i in indices.to_numpy().tolist()]

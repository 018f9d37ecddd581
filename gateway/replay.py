"""Decision replay: recompute every recorded decision from its recorded inputs, and those from earlier rows.

Pure: folds gateway.policy.History over a choice's rows, as the engine did while it decoded, and compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from gateway.core import MIDDLES, Accept, Mode, Outcome, Tier, Verdict
from gateway.folds import Found, fold
from gateway.policy import Policy, f32
from gateway.recorded import Rows

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

    steps needs recorded.COLUMNS. Rows without token ids (capture level `signals`) replay with their recorded
    guard values. Raises UnknownPolicy.
    """
    policy = recorded_policy(request_row["policy"])
    rows = Rows(steps)
    decisions, found = fold(policy, rows, shadow=policy.mode is Mode.SHADOW)
    found = _consistency(policy, rows) + found
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
        found += _middle_consistency(policy, rows, i) if rows.middle[i] else ()
        if outcome is Outcome.FORCED or token is None:
            continue
        if tier is Tier.LARGE:
            if y is not None and token != y:
                found.append((i, "token_id", token, y))
        elif tier is Tier.SMALL and token != x:
            found.append((i, "token_id", token, x))
        elif not isinstance(tier, Tier):
            found.append((i, "tier", tier, "one of the tape's tiers"))
        elif (
            exact and y is not None and outcome in EXAMINED and (outcome is Outcome.ACCEPTED) != (token == y)
        ):
            found.append((i, "outcome", outcome, "accepted" if token == y else "rejected"))
    return found


def _middle_consistency(policy: Policy, rows: Rows, i: int) -> Iterator[Found]:
    """The same of the middle tiers' views on one row."""
    exact = policy.accept in (Accept.EXACT, Accept.TRUST)
    token, views = rows.token_id[i], rows.middle[i]
    for view in views:
        if view.tier not in MIDDLES:
            yield i, "middle.tier", view.tier, "a middle tier"
            continue
        level = policy.at(view.tier)
        if view.draft_limit is None or view.draft_limit > level.draft_length:
            yield i, f"{view.tier}.draft_limit", view.draft_limit, level.draft_length
        if view.score is not None and view.threshold != f32(level.threshold):
            yield i, f"{view.tier}.threshold", view.threshold, f32(level.threshold)
        if (view.verdict is Verdict.REJECTED) != (rows.overruled_by[i] is view.tier):
            yield i, "overruled_by", rows.overruled_by[i], view.tier
        if exact and token is not None and view.verdict is Verdict.REJECTED and view.choice == token:
            yield i, f"{view.tier}.verdict", view.verdict, Verdict.ACCEPTED
    writes = (Verdict.RECOVERED, Verdict.BONUS, Verdict.OWN)
    wrote = next((view for view in reversed(views) if view.verdict in writes), None)
    if rows.tier[i] in MIDDLES and token is not None:
        if wrote is None or wrote.tier is not rows.tier[i]:
            yield i, "tier", rows.tier[i], None if wrote is None else wrote.tier
        elif wrote.choice != token:
            yield i, "token_id", token, wrote.choice

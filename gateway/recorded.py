"""The rows of one choice as the tape holds them, for replay and what-if."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from gateway.core import Action, Outcome, Reason, Signals, Tier, Verdict

COLUMNS = (
    "idx", "seq", "draft_pos", "token_id", "tier", "action", "reason", "score", "threshold", "top1_p",
    "gap", "entropy", "attn_entropy", "hidden", "run_length", "ema_acceptance", "draft_limit", "guard_value",
    "large_used", "probe_u", "fact_value", "small_choice", "large_choice", "outcome", "audit_agrees",
    "round", "middle", "decision_no", "overruled_by",
)  # fmt: skip
"""The columns of `steps` that replay reads."""


@dataclass(frozen=True, slots=True)
class View:
    """One middle tier's entry on a row (core.MiddleView); a value outside its enumeration stays text."""

    tier: Tier
    verdict: Verdict
    choice: int | None
    signals: Signals | None
    action: Action | None
    reason: Reason | None
    score: float | None
    threshold: float | None
    draft_pos: int
    draft_limit: int | None
    run_length: int
    ema_acceptance: float
    guard_value: float
    probe_u: float | None
    fact_value: float | None
    decision_no: int | None


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
        self.overruled_by = _members(steps, "overruled_by", Tier)
        self.audit_agrees: list[bool | None] = steps["audit_agrees"].to_pylist()
        self.round = _numbers(steps, "round")
        self.decision_no = _numbers(steps, "decision_no")
        self.middle = _views(steps)

    def signals(self, i: int) -> Signals | None:
        """What the small model said at row i, if it has spoken."""
        top1_p, gap, entropy = self.top1_p[i], self.gap[i], self.entropy[i]
        if gap is None or entropy is None or top1_p is None:
            return None
        return Signals(top1_p, gap, entropy, self.attn_entropy[i], self.hidden[i])


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


def _views(steps: pa.Table) -> list[tuple[View, ...]]:
    column = steps["middle"]
    if column.null_count == column.length():
        return [()] * column.length()
    return [tuple(map(_view, views or ())) for views in column.to_pylist()]


def _view(entry: Mapping[str, Any]) -> View:
    given = {name: entry[name] for name in View.__dataclass_fields__ if name != "signals"}
    for name, of in (("tier", Tier), ("verdict", Verdict), ("action", Action), ("reason", Reason)):
        given[name] = {member.value: member for member in of}.get(given[name], given[name])
    top1_p, gap, entropy = entry["top1_p"], entry["gap"], entry["entropy"]
    said = None
    if top1_p is not None and gap is not None and entropy is not None:
        said = Signals(top1_p, gap, entropy, entry["attn_entropy"])
    return View(signals=said, **given)

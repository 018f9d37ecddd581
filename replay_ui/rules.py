"""Which rule decided a step, and what each rule before it said; decided anew by gateway.policy."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import fields

from gateway.core import Mode, Signals
from gateway.policy import Policy, State, decide, decide_early, decide_lookup


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule's word on one step. verdict: `no`, `keep`, `defer`, or `not reached`."""

    name: str
    text: str
    verdict: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """All rules in order. agrees: whether deciding anew gives what was recorded; None where nothing was."""

    rules: tuple[Rule, ...]
    agrees: bool | None


ORDER = (
    ("mode", frozenset({"mode"})),
    ("protected", frozenset({"protected_prefix"})),
    ("budget", frozenset({"budget"})),
    ("load", frozenset({"load"})),
    ("draft", frozenset({"draft_full"})),
    ("run", frozenset({"run_limit"})),
    ("loop", frozenset({"loop_guard"})),
    ("lookup", frozenset({"lookup_hit"})),
    ("fact", frozenset({"fact_guard"})),
    ("score", frozenset({"confident", "low_confidence", "probe"})),
)
"""The rules in the order in which gateway.policy asks them, with the reasons each can give."""


def policy_of(summary: Mapping[str, Any]) -> Policy | None:
    """The policy a trace ran under; None where the tape holds one that this version cannot read."""
    raw = summary.get("policy")
    try:
        settings = json.loads(raw) if isinstance(raw, str) else dict(raw or {})
        return Policy.of(settings) if settings else None
    except (ValueError, TypeError):
        return None


def state_of(row: Mapping[str, Any]) -> State | None:
    """The state recorded on a step, or None where it is not whole (capture levels, old tapes)."""
    known: dict[str, Any] = {f.name: row.get(f.name) for f in fields(State)}
    if any(known[f.name] is None for f in fields(State) if f.required):
        return None
    return State(**known)


def signals_of(row: Mapping[str, Any]) -> Signals | None:
    """The small model's signals recorded on a step."""
    if row.get("gap") is None or row.get("top1_p") is None or row.get("entropy") is None:
        return None
    hidden = row.get("hidden")
    # JSON carries bytes as base64.
    state = base64.b64decode(hidden) if isinstance(hidden, str) else hidden
    return Signals(row["top1_p"], row["gap"], row["entropy"], row.get("attn_entropy"), state)


def verdict(policy: Policy, row: Mapping[str, Any]) -> Verdict:
    """What each rule said of this step. A recovered token was decided nowhere: its rules are empty."""
    reason, action = row.get("reason"), row.get("action")
    if reason is None:
        return Verdict((), None)
    texts = _texts(policy, row)
    rules = []
    fired = False
    for name, reasons in ORDER:
        if name == "lookup" and row.get("tier") != "lookup":
            continue
        if fired:
            rules.append(Rule(name, texts[name], "not reached"))
        elif reason in reasons:
            fired = True
            rules.append(Rule(name, texts[name], str(action)))
        else:
            rules.append(Rule(name, texts[name], "no"))
    if not fired:
        rules = [Rule(str(reason).replace("_", " "), "", str(action))]
    return Verdict(tuple(rules), _agrees(policy, row))


def _agrees(policy: Policy, row: Mapping[str, Any]) -> bool | None:
    state, signals = state_of(row), signals_of(row)
    if state is None:
        return None
    anew = decide_lookup(policy, state) if row["reason"] == "lookup_hit" else decide_early(policy, state)
    if anew is None and signals is not None and policy.can_score(signals):
        anew = decide(policy, state, signals)
    if anew is None:
        return None
    return (str(anew.action), str(anew.reason)) == (row["action"], row["reason"])


def _texts(policy: Policy, row: Mapping[str, Any]) -> dict[str, str]:
    def number(name: str) -> str:
        return "?" if row.get(name) is None else f"{row[name]:g}"

    score = row.get("score")
    if score is None:
        scored = "no score"
    else:
        threshold = row.get("threshold")
        limit = policy.threshold if threshold is None else threshold
        scored = f"{score:.3f} {'≥' if score >= limit else '<'} {limit:.3f}"
        if row.get("reason") == "probe":
            scored += ", probed"
    idx = row.get("idx") or 0
    budget = policy.large_token_budget
    return {
        "load": "routing does not pay now" if row.get("draft_limit") == 0 else "routing pays",
        "lookup": "these tokens were followed by this one before",
        "mode": _mode(policy),
        "protected": f"position {idx} {'<' if idx < policy.protect_first else '≥'} {policy.protect_first}",
        "draft": f"{number('draft_pos')} of {number('draft_limit')} waiting",
        "budget": "off" if budget is None else f"{number('large_used')} of {budget} large tokens used",
        "run": f"{number('run_length')} of {policy.max_small_run} in a row",
        "loop": f"seen {number('guard_value')} of {policy.loop_limit} times" if policy.loop_limit else "off",
        "fact": _fact(policy, row),
        "score": scored,
    }


def _mode(policy: Policy) -> str:
    rules = [name for name in ("large_below", "large_kinds") if getattr(policy, name)]
    if not rules or policy.mode is not Mode.LARGE_ONLY:
        return str(policy.mode)
    return f"{policy.mode}, by {' or '.join(rules)}"


def _fact(policy: Policy, row: Mapping[str, Any]) -> str:
    if not policy.fact_guard:
        return "off"
    return "part of a fact" if row.get("fact_value") else "no fact"

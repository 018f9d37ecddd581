"""Requests rows to what a list of traces shows: one summary a trace, its choices within."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def by_trace(rows: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Requests rows grouped by trace, in order of first appearance."""
    traces: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        traces.setdefault(row["request_id"], []).append(row)
    return list(traces.values())


_TOTALS = (
    "completion_tokens",
    "small_tokens",
    "middle_tokens",
    "large_tokens",
    "lookup_tokens",
    "protected_tokens",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "guard_hits",
    "large_passes",
    "middle_passes",
    "small_passes",
    "audited_tokens",
    "audit_agreements",
)


_OF_THE_REQUEST = (
    "trace_no", "request_id", "endpoint", "model", "arm", "policy_name", "policy_hash", "policy", "params",
    "num_topk", "parent", "forked_at", "small_model", "middle_models", "large_model", "small_hash",
    "middle_hashes", "large_hash", "router_hash", "numerics", "version", "capture", "gateway", "user_hash",
)  # fmt: skip
_PROMPT = ("prompt_ids", "prompt_text", "prompt_preview")


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Choice 0's columns, `totals` over all choices, and `choices`: what each has of its own."""
    first = rows[0]
    choices = [
        {
            name: value
            for name, value in row.items()
            if name not in _OF_THE_REQUEST and not (name in _PROMPT and value == first[name])
        }
        for row in rows
    ]
    totals = {name: sum(row[name] or 0 for row in rows) for name in _TOTALS}
    return {
        "id": first["request_id"],
        **first,
        "num_choices": len(rows),
        "totals": totals,
        "choices": choices,
    }

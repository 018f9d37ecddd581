"""The list of traces: its filters as query parameters, and its rows as cells. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import tzinfo
from typing import Any

from replay_ui import view
from replay_ui.pieces import plain, visible

AGES = {"1 h": 3600.0, "24 h": 86400.0, "7 d": 604800.0}

COLUMNS = (
    ("time", "when the request came; hover for UTC"),
    ("prompt", "start of the last user message; hover for the id and, in a fleet, the gateway"),
    ("arm", "stable or canary"),
    ("policy", "name and the start of its hash"),
    ("tokens", "output tokens"),
    ("small", "share of them that the large model did not write"),
    ("accept.", "share of drafts that the large model let stand"),
    ("low gap", "lowest gap of the small model over the answer"),
    ("guards", "positions deferred by a guard"),
    ("time taken", "from receipt to the last token"),
    ("finish", "why it ended"),
    ("gap", "the gap over the answer, 0 at the bottom, 1 at the top"),
)


def filters(query: Mapping[str, Any]) -> dict[str, str]:
    """The filters a URL asks for; unknown ones are left out, values that make no sense too."""
    kept: dict[str, str] = {}
    for name, allowed in (
        ("arm", ("stable", "canary")),
        ("finish_reason", ("stop", "length", "abort", "error")),
        ("age", tuple(AGES)),
    ):
        if query.get(name) in allowed:
            kept[name] = str(query[name])
    for name in ("q", "gateway"):
        if query.get(name):
            kept[name] = str(query[name])
    for name, most in (("min_guard_hits", 1e9), ("max_acceptance", 1.0)):
        try:
            value = float(query.get(name, ""))
        except ValueError:
            continue
        if 0 <= value <= most:
            kept[name] = f"{value:g}"
    return kept


def ask(chosen: Mapping[str, str], now: float) -> dict[str, str]:
    """The same filters as the gateway's parameters: an age becomes `since`."""
    asked = {name: value for name, value in chosen.items() if name != "age"}
    if "age" in chosen:
        asked["since"] = f"{now - AGES[chosen['age']]:.0f}"
    return asked


def chip(name: str, value: str) -> str:
    """A filter in words."""
    words = {
        "age": f"last {value}",
        "q": f"contains “{value}”",
        "min_guard_hits": f"at least {value} guard hits",
        "max_acceptance": f"acceptance ≤ {value}",
        "finish_reason": f"finish: {value}",
    }
    return words.get(name, f"{name}: {value}")


def rows(summaries: Sequence[Mapping[str, Any]], tz: tzinfo) -> list[dict[str, Any]]:
    """Table rows: id and one cell a column."""
    return [{"id": s["id"], "cells": _cells(s, tz)} for s in summaries]


def _cells(s: Mapping[str, Any], tz: tzinfo) -> list[dict[str, Any] | None]:
    counts = {**s, **(s.get("totals") or {})}
    guards = counts.get("guard_hits") or 0
    finish = s.get("finish_reason") or ("interrupted" if s.get("interrupted") else "running")
    preview = " ".join(str(s.get("prompt_preview") or "").split())
    share = view.small_share(counts)
    spark = [0.0 if v is None else v for v in s.get("gap_spark") or []]
    number = "number"
    where = f"{s['id']} on {s['gateway']}" if s.get("gateway") else str(s["id"])
    return [
        {"text": view.clock(s.get("received"), tz), "title": view.utc(s.get("received"))},
        {"text": plain(visible(preview, 160)), "kind": "text", "title": where}
        if preview
        else {
            "text": "empty" if s.get("prompt_preview") is not None else "not recorded",
            "kind": "dim",
            "title": where,
        },
        {"text": str(s.get("arm") or view.DASH)},
        {"text": f"{s.get('policy_name') or '?'}@{str(s.get('policy_hash') or '')[:4]}"},
        {"text": str(counts.get("completion_tokens") or 0), "kind": number},
        None if share is None else {"share": share},
        {"text": view.number(s.get("draft_acceptance_rate")), "kind": number},
        {"text": view.number(s.get("min_gap")), "kind": number},
        {"text": str(guards), "kind": "warn" if guards else number},
        {"text": view.duration(view.took(s)), "kind": number},
        {"text": finish, "kind": "warn" if finish in {"error", "abort"} else ""},
        {"spark": spark} if spark else None,
    ]

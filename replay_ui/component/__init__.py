"""The token strip: one Streamlit component, mounted as the text, as its cursor and as its plot.

The text is heavy and never changes with the step, so Streamlit sends it once; the cursor is light and
returns the step that was clicked or reached by key: `{"pos", "zoom", "n"}`.
"""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from math import nan
from pathlib import Path
from typing import Any

import streamlit as st

from replay_ui.pieces import alone, strip_texts, symbol
from replay_ui.steps import GUARDS, UNWRITTEN, Steps

TIERS = ("small", "large", "lookup", "middle", "middle2", "middle3")
OUTCOMES = ("kept", "accepted", "recovered", "bonus", "large", "forced", "rejected", "discarded")
"""The codes that store.js knows, by place."""

_PARTS = ("store.js", "strip.js", "cursor.js", "plot.js", "mount.js")


@cache
def _component() -> Callable[..., Any]:
    here = Path(__file__).parent
    js = "\n".join((here / name).read_text() for name in _PARTS)
    return st.components.v2.component(
        "tokentape.strip", html='<div class="root"></div>', css=(here / "strip.css").read_text(), js=js
    )


@cache
def _table() -> Callable[..., Any]:
    here = Path(__file__).parent
    return st.components.v2.component(
        "tokentape.table",
        html='<div class="root"></div>',
        css=(here / "table.css").read_text(),
        js=(here / "table.js").read_text(),
    )


def table(data: Mapping[str, Any], key: str) -> str | None:
    """Mount a table whose rows open; returns the id of the row opened just now."""
    opened = _table()(key=key, data=dict(data), on_open_change=lambda: None).open
    return None if opened is None else str(opened)


def texts(steps: Steps) -> list[str]:
    """One marked text a row; rows that were not written stand alone."""
    shown = [""] * len(steps)
    for position, text in zip(
        steps.written, strip_texts(steps.tokens[i] for i in steps.written), strict=True
    ):
        shown[position] = text
    for position, outcome in enumerate(steps.column("outcome")):
        if outcome in UNWRITTEN:
            shown[position] = alone(steps.tokens[position])
    if "token_bytes" not in steps.columns or all(v is None for v in steps.column("token_bytes")):
        return [symbol("▯") for _ in shown]
    return shown


def payload(steps: Steps, group: str, version: str, height: int) -> bytes:
    """The text mount's data: columns packed as base64 of little-endian arrays, NaN where nothing is known."""
    guarded = [reason in GUARDS for reason in steps.column("reason")]
    flags = [guard + 2 * differs for guard, differs in zip(guarded, steps.disagrees, strict=True)]
    latency = [None if v is None else v / 1000 for v in steps.column("latency_us")]
    data = {
        "role": "strip",
        "group": group,
        "version": version,
        "height": height,
        "text": texts(steps),
        "idx": _pack("i", (int(v or 0) for v in steps.column("idx"))),
        "tier": _pack("B", (_code(TIERS, v) for v in steps.column("tier"))),
        "outcome": _pack("B", (_code(OUTCOMES, v) for v in steps.column("outcome"))),
        "flags": _pack("B", flags),
        "threshold": _floats(steps.column("threshold")),
        "gap": _floats(steps.column("gap")),
        "entropy": _floats(steps.column("entropy")),
        "acceptance": _floats(steps.column("ema_acceptance")),
        "latency": _floats(latency),
        "p_large": _floats(steps.column("p_large")),
        "jumps": steps.jumps,
    }
    return json.dumps(data, ensure_ascii=False).encode("utf-8", "surrogatepass")


def text(data: bytes, key: str) -> None:
    """Mount the text."""
    _component()(key=key, data=data)


def cursor(
    data: Mapping[str, Any], key: str, on_step: Callable[[], None], on_act: Callable[[], None]
) -> None:
    """Mount the cursor and legend; the callbacks run before the page does."""
    _component()(key=key, data={"role": "cursor", **data}, on_step_change=on_step, on_act_change=on_act)


def plot(group: str, key: str, height: int) -> None:
    """Mount the plot of the strip's signal."""
    _component()(key=key, data={"role": "plot", "group": group, "height": height})


def _pack(kind: str, values: Iterable[float]) -> str:
    return base64.b64encode(array(kind, values).tobytes()).decode()


def _floats(values: Iterable[float | None]) -> str:
    return _pack("f", (nan if v is None else v for v in values))


def _code(names: tuple[str, ...], value: object) -> int:
    return names.index(value) if value in names else 255

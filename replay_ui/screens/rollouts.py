"""Rollouts: where the canary stands, and the evidence for and against it."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any
from urllib.parse import quote

import streamlit as st

from replay_ui import figures, view
from replay_ui.client import Problem, listed
from replay_ui.session import gateway, plain, show, zone

WORDS = {
    "progressing": "is on its way",
    "promoted": "was promoted: every request uses it",
    "rolled_back": "was rolled back: it was worse than stable",
    "inconclusive": "is paused: what came in proves nothing either way",
    "no_data": "gets no data: no canary request has been judged",
    "aborted": "was aborted by hand",
}
ENDED = {"promoted", "rolled_back", "aborted"}


def page() -> None:
    """The page."""
    answer = gateway().json("GET", "/v1/rollouts")
    rollouts = listed(answer, "rollouts")
    if not rollouts:
        st.info(
            "No rollout has been started. Start one with `tokentape rollout start`, or POST /v1/rollouts."
        )
        return
    names = [str(r["name"]) for r in rollouts]
    active = next(
        (n for n, r in zip(names, rollouts, strict=True) if r.get("verdict") not in ENDED), names[0]
    )
    name = st.selectbox("rollout", names, index=names.index(active), key="o_name", width=320)
    draw(next(r for r in rollouts if r["name"] == name))


def draw(r: Mapping[str, Any]) -> None:
    """One rollout: verdict in words, weight, units, evidence, buttons, history."""
    verdict = str(r.get("verdict"))
    units = r.get("units") or {}
    paused = " It is paused." if r.get("paused") else ""
    step = str(int(r.get("step") or 0) + 1)
    if r.get("steps"):
        step += f" of {len(r['steps'])}"
    st.html(
        f'<div class="tt-head"><b>{view.inert(str(r["name"]), 60)}</b>'
        f"<span>{escape(WORDS.get(verdict, verdict))}.{paused}</span></div>"
        '<div class="tt-tiles">'
        f"{view.tile('weight of the canary', view.share(r.get('weight')))}"
        f"{view.tile('step', escape(step))}"
        f"{view.tile('units, stable', str(units.get('stable', 0)))}"
        f"{view.tile('units, canary', str(units.get('canary', 0)))}</div>"
    )
    canary = r.get("canary") or {}
    if canary:
        changed = ", ".join(f"{name} {value}" for name, value in canary.items())
        st.html(view.dim(f"the canary has {view.inert(changed, 300)}"))
    st.html(evidence(r.get("evidence") or {}))
    unproven = r.get("unproven") or []
    if unproven and verdict not in ENDED:
        st.html(view.dim(f"not yet proven harmless: {view.inert(', '.join(map(str, unproven)), 300)}"))
    if verdict not in ENDED:
        buttons(str(r["name"]), bool(r.get("paused")))
    past = r.get("history") or []
    if past:
        st.html(history(past))


def evidence(metrics: Mapping[str, Mapping[str, Any]]) -> str:
    """Per metric two lines toward their limits: against the canary, and for it."""
    if not metrics:
        return '<p class="tt-dim">No evidence yet.</p>'
    lines = ""
    for name, m in metrics.items():
        limit = float(m.get("limit") or 20.0)
        for side in ("against", "for"):
            value = m.get(side)
            said = f"{view.number(value, 2)} / {limit:g}"
            lines += view.evidence(
                f"{view.inert(name, 30)}, {side}", side, figures.toward(value, limit), said
            )
    return f'{view.dim("evidence, towards its limit (log scale)")}<div class="tt-evidence">{lines}</div>'


def buttons(name: str, paused: bool) -> None:
    """Promote, abort, pause or resume; each asks once."""
    with st.container(horizontal=True, key="o_buttons"):
        for verb in ("promote", "abort", "resume" if paused else "pause"):
            with st.popover(verb.capitalize()):
                st.write(f"{verb.capitalize()} {plain(name)}?")
                if st.button(f"Yes, {verb}", key=f"o_{verb}", type="primary"):
                    try:
                        gateway().ask("POST", f"/v1/rollouts/{quote(name, safe='')}/{verb}")
                    except Problem as problem:
                        show(problem)
                    else:
                        st.rerun()


def history(past: list[Mapping[str, Any]]) -> str:
    """What happened, newest first."""
    tz = zone()
    rows = [
        (
            view.when(h.get("ts"), tz),
            view.inert(str(h.get("event", "")), 40),
            view.share(h.get("weight")),
            view.inert(str(h.get("reason", "")), 160),
        )
        for h in reversed(past)
    ]
    return view.table(("when", "what", "weight", "why"), rows)

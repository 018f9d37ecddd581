"""Replay: one trace as text coloured by who wrote it, one step in full, and what other settings would do."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import Any

import streamlit as st

from replay_ui import component, panel, view
from replay_ui.client import Problem
from replay_ui.link import COLOURS, View
from replay_ui.rules import policy_of
from replay_ui.screens import replay_tools as tools
from replay_ui.screens.replay_walk import change, current, position, select, transport
from replay_ui.session import gateway, go, show, zone
from replay_ui.steps import Steps

STRIP_HEIGHT = 236
PLOT_HEIGHT = 118


@dataclass(frozen=True)
class Loaded:
    """One choice of one trace, as fetched. version changes whenever its rows do."""

    summary: dict[str, Any]
    steps: Steps
    version: str
    data: bytes


def page() -> None:
    """The page."""
    shown = current()
    if not shown.trace:
        pick()
        return
    loaded = fetch(shown.trace, shown.choice)
    if not len(loaded.steps):
        st.html(view.header(loaded.summary, zone()))
        st.info("This trace has no steps yet: nothing was decoded, or its steps were dropped.")
        return
    body(loaded)


def pick() -> None:
    """No trace is named: offer the newest ones."""
    rows, _ = gateway().traces(limit=20)
    if not rows:
        st.info("Nothing is on the tape yet. Send the gateway a request, then look at Traces.")
        return
    names = [row["id"] for row in rows]
    chosen = st.selectbox("Which trace?", names, index=None, placeholder="one of the newest 20")
    if chosen:
        go("replay", trace=chosen)


def fetch(trace: str, choice: int) -> Loaded:
    """The trace from the gateway; what has finished is kept for this tab."""
    key = f"fetched:{trace}:{choice}"
    kept = st.session_state.get(key)
    if isinstance(kept, Loaded) and kept.summary.get("finish_reason"):
        return kept
    with st.spinner("Reading the trace from the tape; a long answer takes a few seconds."):
        return _fetched(key, trace, choice)


def _fetched(key: str, trace: str, choice: int) -> Loaded:
    summary = gateway().trace(trace)
    choices = summary.get("choices") or []
    if choice < len(choices):
        summary = {**summary, **choices[choice]}
    steps = Steps.read(gateway().steps(trace, choice))
    version = hashlib.sha256(f"{trace}:{choice}:{len(steps)}".encode()).hexdigest()[:16]
    loaded = Loaded(summary, steps, version, component.payload(steps, "main", version, STRIP_HEIGHT))
    for old in [n for n in st.session_state if str(n).startswith("fetched:")][:-3]:
        del st.session_state[old]
    st.session_state[key] = loaded
    return loaded


@st.fragment
def body(loaded: Loaded) -> None:
    """All that changes with the step; a rerun of it asks the gateway for nothing it has."""
    steps, state = loaded.steps, st.session_state
    shown: View = state["view"]
    at = position(steps)
    with st.container(horizontal=True, vertical_alignment="center", key="actions"):
        st.html(view.header(loaded.summary, zone()))
        fork = st.button(
            "Fork", key="b_fork", icon=":material/call_split:", help="Run again from this step (F)"
        )
        tools.export(loaded.summary, shown.trace)
        tools.permalink(shown)
    for said in view.warnings(loaded.summary, steps):
        st.warning(said)
    options(loaded)
    shown = state["view"]
    with st.expander("prompt", expanded=False):
        st.html(panel.prompt(loaded.summary) or "The prompt was not recorded (capture level).")
    component.text(loaded.data, key="strip")
    answer = tools.what_if_answer(shown, policy_of(loaded.summary))
    cursor(loaded, at, answer)
    transport(steps, at)
    left, right = st.columns([11, 10], gap="medium")
    with left:
        step_card(loaded, at)
    with right:
        component.plot("main", key="plot", height=PLOT_HEIGHT)
        tools.what_if(shown, loaded.summary, steps, answer)
    if fork or state.pop("fork_asked", False):
        tools.fork_dialog(shown, loaded.summary, steps, at)


def options(loaded: Loaded) -> None:
    """Colour, rejected drafts, find, and the choice where there are several."""
    state, shown = st.session_state, st.session_state["view"]
    state.setdefault("r_colour", shown.colour)
    state.setdefault("r_drafts", shown.drafts)
    state.setdefault("r_find", shown.find)
    with st.container(horizontal=True, key="options", gap="medium", vertical_alignment="center"):
        colour = st.segmented_control(
            "colour by", COLOURS, key="r_colour", label_visibility="collapsed", help="colour by"
        )
        drafts = st.toggle("rejected drafts", key="r_drafts")
        find = st.text_input(
            "find", key="r_find", placeholder="find in the answer", label_visibility="collapsed", width=190
        )
        number = int(loaded.summary.get("num_choices") or 1)
        if number > 1:
            state.setdefault("r_choice", shown.choice)
            st.selectbox(
                "choice",
                range(number),
                key="r_choice",
                format_func=lambda i: f"choice {i}",
                label_visibility="collapsed",
                width=120,
                on_change=lambda: change(choice=state["r_choice"], step=0, draft=None, zoom=None),
            )
    change(colour=colour or "route", drafts=drafts, find=find)
    if state["view"].choice != shown.choice:
        st.rerun()


def cursor(loaded: Loaded, at: int, answer: dict[str, Any] | None) -> None:
    """The light half of the strip: where the reader is, what is greyed, the address bar."""
    state, steps = st.session_state, loaded.steps
    shown: View = state["view"]
    exact = view.setting(loaded.summary, "accept") == "exact"
    flips = [steps.by_idx[i] for i in (answer or {}).get("flips") or [] if i in steps.by_idx]
    note = ""
    after = -1
    if flips and not exact:
        after = flips[0]
        note = "Beyond this point the text itself would differ; fork to see it."
    elif flips:
        note = "Under exact the text stays the same: the large model checks every token."
    found = view.find(steps, shown.find)
    if shown.find:
        note = (
            f"“{shown.find}”: {len(found)} tokens match. {note}"
            if found
            else f"“{shown.find}” is not in the answer."
        )
    state["issued"] = [*state.get("issued", [])[-30:], shown.query()]
    data = {
        "group": "main",
        "session": state.setdefault("strip_session", secrets.token_hex(4)),
        "keys": True,
        "pos": at,
        "ack": state.get("ack", 0),
        "play": state.get("play", 0),
        "colour": shown.colour,
        "drafts": shown.drafts,
        "zoom": list(shown.zoom) if shown.zoom else None,
        "threshold": shown.what_if.get("threshold"),
        "flips": flips,
        "after": after,
        "found": found,
        "note": note,
        "url": shown.query(),
    }

    def on_step() -> None:
        sent = state["cursor"]["step"]
        state["ack"] = int(sent["n"])
        zoom = sent.get("zoom")
        select(steps, min(max(int(sent["pos"]), 0), len(steps) - 1))
        change(zoom=(int(zoom[0]), int(zoom[1])) if zoom else None)

    def on_act() -> None:
        sent = state["cursor"]["act"]
        state["ack"] = int(sent["n"])
        select(steps, min(max(int(sent["pos"]), 0), len(steps) - 1))
        state["fork_asked"] = sent["what"] == "fork"

    component.cursor(data, "cursor", on_step, on_act)


def step_card(loaded: Loaded, at: int) -> None:
    """The step panel."""
    try:
        texts = gateway().texts(panel.wanted_ids(loaded.steps, at))
    except Problem as problem:
        show(problem)
        texts = {}
    names = panel.token_names(loaded.steps, at, texts)
    st.html(panel.card(policy_of(loaded.summary), loaded.steps, at, names))

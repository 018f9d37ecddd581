"""Replay: one trace as text coloured by who wrote it, one step in full, and what other settings would do."""

from __future__ import annotations

import hashlib
import secrets
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any

import streamlit as st

from replay_ui import component, link, panel, view
from replay_ui.client import Problem
from replay_ui.link import COLOURS, View
from replay_ui.rules import policy_of
from replay_ui.screens import replay_tools as tools
from replay_ui.session import gateway, go, show, zone
from replay_ui.steps import JUMPS, UNWRITTEN, Steps

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


def current() -> View:
    """The view in force: the URL's where the reader has just come by it, else this tab's own."""
    query = {name: st.query_params[name] for name in st.query_params}
    asked = link.read(query)
    state = st.session_state
    arrived = asked.query() if asked.trace else ""
    if arrived and arrived not in state.get("issued", ()):
        state["view"] = asked
        state["issued"] = [arrived]
        for name in [n for n in state if str(n).startswith("r_")]:
            del state[name]
    found: View = state.setdefault("view", View())
    return found


def change(**what: Any) -> None:
    """Change the view in force."""
    st.session_state["view"] = replace(st.session_state["view"], **what)


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


def position(steps: Steps) -> int:
    """Where the view's step lies among the rows."""
    shown = st.session_state["view"]
    if shown.draft is not None:
        seq = steps.column("seq")
        for i in range(len(steps)):
            if seq[i] == shown.draft:
                return i
    if shown.step in steps.by_idx:
        return steps.by_idx[shown.step]
    last = steps.written[-1] if steps.written else 0
    return last if shown.step > 0 else 0


def select(steps: Steps, at: int) -> None:
    """Make the row at `at` the current step."""
    unwritten = steps.column("outcome")[at] in UNWRITTEN
    change(step=int(steps.column("idx")[at] or 0), draft=steps.column("seq")[at] if unwritten else None)


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


def transport(steps: Steps, at: int) -> None:
    """A real widget for everything the strip's keys do."""
    state, shown = st.session_state, st.session_state["view"]
    written = steps.written
    place = max(bisect_right(written, at) - 1, 0)
    state["r_scrub"] = place

    def to(by: int) -> None:
        select(steps, steps.move(at, by, shown.drafts))

    def jump(kind: str, back: bool) -> None:
        select(steps, steps.jump(at, kind, back))

    with st.container(horizontal=True, key="transport", gap="xsmall", vertical_alignment="center"):
        for icon, by, name, key in (
            ("first_page", -len(steps), "first", "home"),
            ("keyboard_double_arrow_left", -10, "back 10", "shift ←"),
            ("chevron_left", -1, "back", "←"),
        ):
            st.button(f":material/{icon}:", key=f"b_{name}", help=f"{name} ({key})", on_click=to, args=(by,))
        st.button(":material/play_arrow:", key="b_play", help="play (space)", on_click=tools.toggle_play)
        for icon, by, name, key in (
            ("chevron_right", 1, "forward", "→"),
            ("keyboard_double_arrow_right", 10, "forward 10", "shift →"),
            ("last_page", len(steps), "last", "end"),
        ):
            st.button(f":material/{icon}:", key=f"b_{name}", help=f"{name} ({key})", on_click=to, args=(by,))
        if len(written) > 1:
            st.slider(
                "step",
                0,
                len(written) - 1,
                key="r_scrub",
                label_visibility="collapsed",
                width=440,
                on_change=lambda: select(steps, written[state["r_scrub"]]),
            )
        for kind, key in JUMPS.items():
            count = len(steps.jumps[kind])
            help_text = (
                f"next {kind} ({key}); {count} in this answer"
                if kind != "lowest gap"
                else "the lowest gap, then the next lowest (M)"
            )
            st.button(
                "\u2039", key=f"b_prev {kind}", help=f"previous {kind} (shift {key})", on_click=jump,
                args=(kind, True), disabled=not count,
            )  # fmt: skip
            st.button(
                f"{kind} {key}", key=f"b_next {kind}", help=help_text, on_click=jump, args=(kind, False),
                disabled=not count,
            )  # fmt: skip
        tools.help_button()


def step_card(loaded: Loaded, at: int) -> None:
    """The step panel."""
    try:
        texts = gateway().texts(panel.wanted_ids(loaded.steps, at))
    except Problem as problem:
        show(problem)
        texts = {}
    names = panel.token_names(loaded.steps, at, texts)
    st.html(panel.card(policy_of(loaded.summary), loaded.steps, at, names))

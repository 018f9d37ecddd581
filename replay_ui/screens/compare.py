"""Compare: two answers side by side, aligned by position, opened where they part."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from html import escape
from typing import Any
from urllib.parse import urlencode

import streamlit as st

from replay_ui import component, figures, panel, view
from replay_ui.client import Problem
from replay_ui.rules import policy_of
from replay_ui.screens.replay import Loaded, fetch
from replay_ui.session import gateway, go, zone
from replay_ui.steps import Steps

HEIGHT = 210


def page() -> None:
    """The page."""
    state = st.session_state
    names = tuple(str(st.query_params.get(side, "")) for side in ("a", "b"))
    if not all(names):
        pick(names[0], names[1])
        return
    left, right = fetch(names[0], 0), fetch(names[1], 0)
    parted = figures.divergence(left.steps, right.steps)
    if state.get("c_names") != names:
        state["c_names"] = names
        asked = str(st.query_params.get("step", ""))
        state["c_step"] = int(asked) if asked.isdecimal() else parted or 0
    body(left, right, parted)


def pick(a: str, b: str) -> None:
    """Choose the two traces."""
    rows, _ = gateway().traces(limit=50)
    names = [row["id"] for row in rows]
    if len(names) < 2 and not (a and b):
        st.info("Compare needs two traces, and the tape has fewer. Fork one in Replay, or send a request.")
        return
    st.write("Which two traces?")
    left, right = st.columns(2)
    how: dict[str, Any] = {"index": None, "accept_new_options": True, "placeholder": "one of the newest 50"}
    with left:
        a = a or st.selectbox("left", names, key="c_a", **how) or ""
    with right:
        b = b or st.selectbox("right", names, key="c_b", **how) or ""
    if a and b:
        go("compare", a=a, b=b)


@st.fragment
def body(left: Loaded, right: Loaded, parted: int | None) -> None:
    """Both strips, the step on either side, what differs."""
    state = st.session_state
    step = int(state["c_step"])
    said = (
        "The answers are the same, token for token."
        if parted is None
        else f"They part at step {parted}: the tokens before it are the same."
    )
    with st.container(horizontal=True, vertical_alignment="center", key="c_head"):
        st.html(f'<div class="tt-head"><strong>{escape(said)}</strong>{largest(left, right)}</div>')
        if parted is not None:
            st.button("To the divergence", key="c_to", on_click=lambda: state.update(c_step=parted))
        st.button(":material/chevron_left:", key="c_back", on_click=move, args=(-1, left, right))
        st.button(":material/chevron_right:", key="c_forward", on_click=move, args=(1, left, right))
        if st.button("Swap", icon=":material/swap_horiz:", key="c_swap"):
            go("compare", a=right.summary["id"], b=left.summary["id"])
    for side, column, loaded in zip("ab", st.columns(2, gap="medium"), (left, right), strict=True):
        with column:
            with st.container(horizontal=True, vertical_alignment="center", wrap=False, key=f"c_row_{side}"):
                st.html(view.header(loaded.summary, zone(), brief=True))
                if st.button(":material/replay:", key=f"c_open_{side}", help="open in Replay"):
                    go("replay", trace=loaded.summary["id"], step=step)
            strip(side, loaded, step, parted, left, right)
            at = loaded.steps.by_idx.get(step)
            if at is None:
                st.caption(f"This answer has no step {step}.")
            else:
                names = token_names(loaded.steps, at)
                st.html(panel.card(policy_of(loaded.summary), loaded.steps, at, names, numbers=False))
    tables(left.summary, right.summary)


def strip(side: str, loaded: Loaded, step: int, parted: int | None, left: Loaded, right: Loaded) -> None:
    """One side's text and cursor; a click on either side moves both."""
    state = st.session_state
    steps, key = loaded.steps, f"c_cursor_{side}"
    version = f"{loaded.version}-{side}"
    component.text(component.payload(steps, side, version, HEIGHT), key=f"c_strip_{side}")

    def on_step() -> None:
        sent = state[key]["step"]
        state[f"{key}_ack"] = int(sent["n"])
        state["c_step"] = int(steps.column("idx")[min(max(int(sent["pos"]), 0), len(steps) - 1)] or 0)

    data = {
        "group": side,
        "session": state.setdefault("strip_session", secrets.token_hex(4)),
        "keys": False,
        "pos": steps.by_idx.get(step, steps.written[-1] if steps.written else 0),
        "ack": state.get(f"{key}_ack", 0),
        "play": 0,
        "colour": "route",
        "drafts": False,
        "zoom": None,
        "threshold": None,
        "flips": [steps.by_idx[parted]] if parted in steps.by_idx else [],
        "after": -1,
        "found": [],
        "note": "",
        "centre": True,
        "url": urlencode({"a": left.summary["id"], "b": right.summary["id"], "step": step}),
    }
    component.cursor(data, key, on_step, _nothing)


def _nothing() -> None:
    """The compared strips have no action but the click."""


def move(by: int, left: Loaded, right: Loaded) -> None:
    """Both sides one step on or back."""
    last = max(len(left.steps.written), len(right.steps.written)) - 1
    st.session_state["c_step"] = min(max(int(st.session_state["c_step"]) + by, 0), last)


def token_names(steps: Steps, at: int) -> Mapping[int, str]:
    """Texts of the panel's tokens; ids where the gateway does not answer."""
    try:
        return panel.token_names(steps, at, gateway().texts(panel.wanted_ids(steps, at)))
    except Problem:
        return panel.token_names(steps, at, {})


def largest(left: Loaded, right: Loaded) -> str:
    """What the gateway's own diff adds: the largest difference in log-probability up to the divergence."""
    key = f"fetched:diff:{left.version}:{right.version}"
    if key not in st.session_state:
        try:
            st.session_state[key] = gateway().diff(left.summary["id"], right.summary["id"])
        except Problem:
            st.session_state[key] = {}
    value = st.session_state[key].get("max_logprob_difference")
    return "" if value is None else f"<span>largest logprob difference up to it: {value:.2g} nats</span>"


def tables(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    """What differs in policy, and the counts."""
    left, right = st.columns(2, gap="medium")
    rows = figures.policy_differences(a, b)
    with left:
        same = view.dim("Policy, models and seed are the same.")
        st.html(_table("policy", rows) if rows else same)
    with right:
        st.html(_table("counts", figures.count_differences(a, b)))


def _table(title: str, rows: list[tuple[str, str, str]]) -> str:
    cells = [[view.inert(text, 60) for text in row] for row in rows]
    return view.table((title, "left", "right"), cells, [row[1] != row[2] for row in rows])

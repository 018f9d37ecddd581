"""Where the reader of a trace is: the view in force, the step within it, and the widgets that walk."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import Any

import streamlit as st

from replay_ui import link
from replay_ui.link import View
from replay_ui.screens import replay_tools as tools
from replay_ui.steps import JUMPS, UNWRITTEN, Steps


def current() -> View:
    """The view in force: the URL's where the reader has just come by it, else this tab's own."""
    query = {name: st.query_params[name] for name in st.query_params}
    asked = link.read(query)
    state = st.session_state
    arrived = asked.query() if asked.trace else ""
    # Streamlit goes on sending the address the page was opened by, while the strip writes newer ones.
    if arrived and arrived != state.get("arrived") and arrived not in state.get("issued", ()):
        state["view"] = asked
        state["arrived"] = arrived
        state["issued"] = []
        for name in [n for n in state if str(n).startswith("r_")]:
            del state[name]
    found: View = state.setdefault("view", View())
    return found


def change(**what: Any) -> None:
    """Change the view in force."""
    st.session_state["view"] = replace(st.session_state["view"], **what)


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

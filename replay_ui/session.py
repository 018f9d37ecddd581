"""What the pages share within one browser tab: the gateway, the API key, the way to another page."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import tzinfo
from typing import Any, NoReturn

import streamlit as st
from streamlit.navigation.page import StreamlitPage

from replay_ui import view
from replay_ui.client import Gateway, Problem, gateway_url

PAGES: dict[str, StreamlitPage] = {}
"""The pages by name, filled by app.py at each run."""


def gateway() -> Gateway:
    """This tab's connection to the gateway."""
    if "gateway" not in st.session_state:
        st.session_state["gateway"] = Gateway(gateway_url())
    found: Gateway = st.session_state["gateway"]
    return found


def zone() -> tzinfo:
    """The reader's time zone, from the browser."""
    return view.zone(st.context.timezone)


def go(page: str, **query: Any) -> NoReturn:
    """Open another page with these query parameters."""
    # Replay must take what it is now told, though it may have been there before.
    for name in ("arrived", "issued"):
        st.session_state.pop(name, None)
    st.switch_page(PAGES[page], query_params={name: str(value) for name, value in query.items()})


def ask_again() -> None:
    """Forget what was fetched, so that the next run asks the gateway anew."""
    for name in [n for n in st.session_state if str(n).startswith("fetched:")]:
        del st.session_state[name]


def show(problem: Problem) -> None:
    """A problem's sentence, its next action, and the widget that takes it."""
    icon = {"down": ":material/cloud_off:", "denied": ":material/key:", "absent": ":material/search_off:"}
    st.warning(f"{plain(problem.says)} {plain(problem.then)}", icon=icon.get(problem.kind, ":material/info:"))
    if problem.kind == "denied":
        key = st.text_input("API key", type="password", key="api_key_entry")
        if key:
            gateway().key = key
            ask_again()
            st.rerun()
    elif problem.kind in {"down", "failed"} and st.button("Try again", icon=":material/refresh:"):
        ask_again()
        st.rerun()


def plain(text: str) -> str:
    """Text for Streamlit's Markdown with nothing in it that Markdown or HTML would act on."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]()#+-.!|<>$~:&" else c for c in text)


def guard(page: Callable[[], None]) -> Callable[[], None]:
    """The page, with any Problem shown in its place."""

    @functools.wraps(page)
    def guarded() -> None:
        try:
            page()
        except Problem as problem:
            show(problem)
        if gateway().offline:
            st.caption(
                ":material/cloud_off: The gateway cannot be reached: this is the tape on disk, read-only. "
                "What-if, fork and live numbers need the gateway."
            )

    guarded.__name__ = page.__module__.rsplit(".", 1)[-1]
    return guarded

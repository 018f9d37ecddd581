"""Traces: the newest requests, filtered; a row opens Replay."""

from __future__ import annotations

import time

import streamlit as st

from replay_ui import component, listing
from replay_ui.session import gateway, go, zone

PAGE = 22
ANY = "any"


def page() -> None:
    """The page."""
    state = st.session_state
    query = {name: st.query_params[name] for name in st.query_params}
    chosen = listing.filters(query)
    if chosen != state.get("t_filters"):
        state["t_filters"] = chosen
        state["t_cursors"] = [None]
        for name in [n for n in state if str(n).startswith("t_w_")]:
            del state[name]
    widgets(chosen)
    cursors: list[str | None] = state.setdefault("t_cursors", [None])
    rows, following = gateway().traces(
        limit=PAGE, cursor=cursors[-1], **listing.ask(chosen, now=int(time.time() / 60) * 60)
    )
    if not rows:
        empty(bool(chosen), len(cursors) > 1)
        return
    data = {"columns": listing.COLUMNS, "rows": listing.rows(rows, zone())}
    opened = component.table(data, key="traces")
    if opened:
        go("replay", trace=opened)
    with st.container(horizontal=True, vertical_alignment="center"):
        if st.button("Newer", icon=":material/arrow_back:", disabled=len(cursors) == 1, key="t_newer"):
            cursors.pop()
            st.rerun()
        if st.button("Older", icon=":material/arrow_forward:", disabled=not following, key="t_older"):
            cursors.append(following)
            st.rerun()
        named = st.selectbox(
            "open a trace",
            [row["id"] for row in rows],
            index=None,
            placeholder="open a trace by its id",
            label_visibility="collapsed",
            accept_new_options=True,
            width=330,
            key="t_open",
        )
        if named:
            go("replay", trace=named)


def widgets(chosen: dict[str, str]) -> None:
    """The filters, and those in force as chips that a click removes."""
    state = st.session_state

    def put(name: str, value: object) -> None:
        after = {**chosen, name: str(value)}
        if value in (None, "", ANY):
            after.pop(name)
        st.query_params.from_dict(after)

    def seed(name: str, value: object) -> str:
        key = f"t_w_{name}"
        state.setdefault(key, value)
        return key

    with st.container(horizontal=True, key="filters", vertical_alignment="bottom", gap="small"):
        key = seed("q", chosen.get("q", ""))
        st.text_input(
            "contains", key=key, width=240, placeholder="text of prompt, answer or id",
            on_change=lambda: put("q", state["t_w_q"]),
        )  # fmt: skip
        for name, label, options in (
            ("arm", "arm", (ANY, "stable", "canary")),
            ("finish_reason", "finish", (ANY, "stop", "length", "abort", "error")),
            ("age", "last", (ANY, *listing.AGES)),
        ):
            key = seed(name, chosen.get(name, ANY))
            st.selectbox(
                label, options, key=key, width=130,
                on_change=lambda name=name, key=key: put(name, state[key]),
            )  # fmt: skip
        key = seed(
            "min_guard_hits", int(float(chosen["min_guard_hits"])) if "min_guard_hits" in chosen else None
        )
        st.number_input(
            "guard hits, least", min_value=0, key=key, width=150, placeholder="any",
            on_change=lambda: put("min_guard_hits", state["t_w_min_guard_hits"]),
        )  # fmt: skip
        key = seed("max_acceptance", float(chosen["max_acceptance"]) if "max_acceptance" in chosen else None)
        st.number_input(
            "acceptance, most", min_value=0.0, max_value=1.0, step=0.05, key=key, width=140,
            placeholder="any", on_change=lambda: put("max_acceptance", state["t_w_max_acceptance"]),
        )  # fmt: skip
    if chosen:
        with st.container(horizontal=True, key="chips", gap="xsmall"):
            for name, value in chosen.items():
                st.button(
                    f"{listing.chip(name, value)}  ✕".replace("$", "\\$"), key=f"t_chip_{name}", on_click=put,
                    args=(name, None), help="remove this filter",
                )  # fmt: skip


def empty(filtered: bool, paged: bool) -> None:
    """Why there is nothing, and what to do."""
    if filtered:
        st.info("No trace matches these filters. Remove one of the chips above.")
    elif paged:
        st.info("There are no older traces.")
    else:
        st.info("Nothing is on the tape yet. Send the gateway a request, for instance:")
        st.code(
            f"curl {gateway().url}/v1/chat/completions -H 'content-type: application/json' "
            "-d '{\"model\": \"MODEL\", \"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'",
            language="bash",
        )  # fmt: skip
        if st.button("Look again", icon=":material/refresh:"):
            st.rerun()

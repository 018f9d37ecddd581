"""Replay's tools: export, permalink, what-if, fork, the list of keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote, urlsplit

import streamlit as st

from gateway.core import Accept
from gateway.policy import Policy
from replay_ui import panel, view
from replay_ui.client import Problem
from replay_ui.link import View
from replay_ui.pieces import plain as unmarked
from replay_ui.session import gateway, go, plain, show
from replay_ui.steps import Steps

KEYS = (
    ("← →", "one step"),
    ("shift ← →", "ten steps"),
    ("home end", "first, last step"),
    ("R", "next rejection"),
    ("L", "next token of the large model"),
    ("G", "next guard hit"),
    ("A", "next token the large model disagrees with"),
    ("M", "lowest gap, then the next lowest"),
    ("shift + letter", "back"),
    ("space", "play, stop"),
    ("F", "fork here"),
    ("?", "this list"),
)

SLIDERS: tuple[tuple[str, str, float, float, float, str], ...] = (
    ("threshold", "threshold", 0.0, 1.0, 0.01, "routing score from which the small model keeps its token"),
    ("protect_first", "protect", 0, 64, 1, "first tokens that the large model writes"),
    ("max_small_run", "run", 1, 128, 1, "most tokens in a row without the large model"),
    ("draft_length", "draft", 1, 32, 1, "most drafted tokens per verification"),
)


def toggle_play() -> None:
    """Tell the strip to start or stop playing."""
    st.session_state["play"] = st.session_state.get("play", 0) + 1


def help_button() -> None:
    """The list of keys."""
    with st.popover("?", help="keys (?)"):
        st.html(
            "<table>"
            + "".join(f"<tr><td><code>{k}</code></td><td>{w}</td></tr>" for k, w in KEYS)
            + "</table>"
        )


def export(summary: Mapping[str, Any], trace: str) -> None:
    """Download the trace as JSON lines or Parquet; fetched when asked."""
    with st.popover("Export", icon=":material/download:"):
        for form in ("jsonl", "parquet"):

            def fetch(form: str = form) -> bytes:
                path = f"/v1/traces/{quote(trace, safe='')}/export"
                return gateway().ask("GET", path, params={"format": form}).content

            st.download_button(
                f"{form}", fetch, file_name=f"{_file_name(trace)}.{form}", on_click="ignore", key=f"b_{form}"
            )


def _file_name(trace: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in trace)[:100]


def permalink(shown: View) -> None:
    """The address that restores this view."""
    with st.popover("Link", icon=":material/link:"):
        at = urlsplit(st.context.url or "http://127.0.0.1:8501/replay")
        st.caption("This address alone restores trace, choice, step, colour, what-if and zoom.")
        st.code(f"{at.scheme}://{at.netloc}{at.path}?{shown.query()}", language=None)


def what_if_answer(shown: View, policy: Policy | None) -> dict[str, Any] | None:
    """The gateway's answer to the settings in force; None where they are the recorded ones."""
    state = st.session_state
    overrides = {
        name: value
        for name, value in shown.what_if.items()
        if policy is None or value != getattr(policy, name)
    }
    if not overrides:
        return None
    key = f"fetched:what-if:{shown.trace}:{shown.choice}:{sorted(overrides.items())}"
    if key not in state:
        for old in [n for n in state if str(n).startswith("fetched:what-if:")][:-8]:
            del state[old]
        try:
            state[key] = gateway().what_if(shown.trace, overrides, shown.choice)
        except Problem as problem:
            return {"problem": problem}
    found: dict[str, Any] = state[key]
    return found


def what_if(shown: View, summary: Mapping[str, Any], steps: Steps, answer: dict[str, Any] | None) -> None:
    """Sliders over the recorded settings, and what they would have changed."""
    state = st.session_state
    policy = summary.get("policy")
    if not isinstance(policy, Mapping):
        st.caption("What-if needs the policy, which this trace does not carry.")
        return

    def changed() -> None:
        given = {name: state[f"r_w_{name}"] for name, *_ in SLIDERS}
        moved = {name: value for name, value in given.items() if value != policy[name]}
        _change(what_if=moved)

    def back() -> None:
        for name, *_ in SLIDERS:
            state.pop(f"r_w_{name}", None)
        _change(what_if={})

    with st.container(key="whatif", gap="xsmall"):
        for pair in (SLIDERS[:2], SLIDERS[2:]):
            for column, (name, label, low, high, step, why) in zip(st.columns(2), pair, strict=True):
                kind = float if isinstance(step, float) else int
                recorded = kind(policy[name])
                state.setdefault(f"r_w_{name}", kind(shown.what_if.get(name, recorded)))
                column.slider(
                    f"what if: {label}",
                    kind(low),
                    max(kind(high), recorded, state[f"r_w_{name}"]),
                    step=kind(step),
                    key=f"r_w_{name}",
                    on_change=changed,
                    help=f"{why}; recorded: {recorded:g}",
                )
        if answer is None:
            kept = view.share(view.kept_share(steps))
            st.html(
                f'<div class="tt-whatif tt-dim">kept {kept} as recorded; move a slider to see flips</div>'
            )
            return
        if "problem" in answer:
            problem: Problem = answer["problem"]
            said = (
                "This gateway cannot answer what-if yet." if problem.kind == "unsupported" else problem.says
            )
            st.caption(plain(f"{said} {problem.then}"))
            return
        exact = view.setting(summary, "accept") == str(Accept.EXACT)
        said, notes = view.what_if_sentence(answer, exact)
        with st.container(horizontal=True, vertical_alignment="top", wrap=False):
            st.html(f'<div class="tt-whatif"><b>{said}</b><br>{"; ".join(notes)}</div>')
            st.button("Reset", key="b_reset", on_click=back, type="tertiary")


def _change(**what: Any) -> None:
    st.session_state["view"] = replace(st.session_state["view"], **what)


@st.dialog("Fork here")
def fork_dialog(shown: View, summary: Mapping[str, Any], steps: Steps, at: int) -> None:
    """Run the models again from this step, with another token or other settings."""
    row = steps.row(at)
    idx = int(row["idx"])
    try:
        names = panel.token_names(steps, at, gateway().texts(panel.wanted_ids(steps, at)))
    except Problem as problem:
        show(problem)
        return
    st.write(f"Positions before step {idx} stay as recorded; from there the models decode anew.")
    alternatives: dict[int, str] = {}
    for who in ("large", "small"):
        for i in row.get(f"{who}_topk_ids") or []:
            alternatives.setdefault(i, f"{unmarked(names.get(i, f'#{i}'))}  ({who} model)")
    asis = -1
    chosen = st.selectbox(
        "token at this step",
        [asis, *alternatives],
        format_func=lambda i: "let the models choose" if i == asis else alternatives[i],
        key="f_token",
    )
    typed = st.text_input("or type one token", key="f_typed", help="must be exactly one token; spaces count")
    settings = st.toggle(
        "use the what-if settings", value=bool(shown.what_if), disabled=not shown.what_if, key="f_settings"
    )
    if not st.button("Run", type="primary", icon=":material/call_split:", key="b_run_fork"):
        return
    token: int | None = None if chosen == asis else chosen
    try:
        if typed:
            ids = gateway().tokenize(typed)
            if len(ids) != 1:
                st.error(f"That is {len(ids)} tokens; a fork forces exactly one.")
                return
            token = ids[0]
        with st.spinner("decoding"):
            made = gateway().fork(shown.trace, idx, token, shown.what_if if settings else {}, shown.choice)
    except Problem as problem:
        show(problem)
        return
    go("compare", a=shown.trace, b=made)

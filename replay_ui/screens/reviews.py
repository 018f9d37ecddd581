"""Reviews: spot checks of answers drawn at random, one at a time, blind to the arm."""

from __future__ import annotations

from typing import Any

import streamlit as st

from replay_ui import figures, view
from replay_ui.client import listed
from replay_ui.pieces import prose
from replay_ui.session import gateway, go

DRAW = 50
VERDICTS = (
    ("good", "G", ":material/thumb_up:"),
    ("bad", "B", ":material/thumb_down:"),
    ("unsure", "U", ":material/help:"),
)


def page() -> None:
    """The page."""
    state = st.session_state
    if "v_drawn" not in state and not draw():
        return
    drawn: list[dict[str, Any]] = state["v_drawn"]
    done: list[tuple[dict[str, Any], str]] = state["v_done"]
    if not drawn:
        st.info(
            "Nothing is left to review: the tape is empty, or every answer on it has its verdict. "
            "Send the gateway requests, then draw again."
        )
        if st.button("Draw again", icon=":material/refresh:", key="v_again"):
            state.pop("v_drawn")
            st.rerun()
        return
    progress(len(done), len(drawn), [verdict for _, verdict in done])
    if done:
        last, verdict = done[-1]
        st.caption(f"the last one was {last.get('arm') or 'of no arm'}, you said {verdict}")
    if len(done) >= len(drawn):
        st.success("That is all of this draw.")
        if st.button("Draw more", icon=":material/refresh:", key="v_again"):
            state.pop("v_drawn")
            st.rerun()
        return
    one(drawn[len(done)])


def draw() -> bool:
    """Fetch a random draw of unreviewed answers."""
    answer = gateway().json("GET", "/v1/reviews/sample", params={"n": DRAW})
    rows = listed(answer, "traces")
    st.session_state["v_drawn"] = [{"id": row.get("request_id"), **row} for row in rows]
    st.session_state["v_done"] = []
    return True


def progress(done: int, drawn: int, verdicts: list[str]) -> None:
    """How far, and the share of good ones with its interval."""
    said = f"{min(done + 1, drawn)} of {drawn}" if done < drawn else f"{done} of {drawn}"
    judged = [v for v in verdicts if v != "unsure"]
    between = figures.wilson(judged.count("good"), len(judged))
    if between:
        rate = judged.count("good") / len(judged)
        said += (
            f" · good {view.share(rate)}, 95 % interval {view.share(between[0])} to {view.share(between[1])}"
        )
        said += f" of {len(judged)} judged"
    st.progress(done / drawn, text=said)


def one(row: dict[str, Any]) -> None:
    """One answer: prompt, text, verdict. Neither arm nor policy is shown before the verdict."""
    state = st.session_state
    trace = row if row.get("answer_text") and row.get("prompt_text") else gateway().trace(row["id"])
    prompt = str(trace.get("prompt_preview") or trace.get("prompt_text") or "")
    answer = str(trace.get("answer_text") or "")
    for name, words in (("prompt", prompt), ("answer", answer)):
        st.html(f'{view.dim(name)}<div class="tt-answer">{text(words)}</div>')

    def say(verdict: str) -> None:
        gateway().review(row["id"], verdict, state.get("v_note", ""), state.get("v_reviewer", ""))
        state["v_done"].append((trace, verdict))
        state["v_note"] = ""

    with st.container(horizontal=True, vertical_alignment="bottom", key="v_say"):
        for verdict, key, icon in VERDICTS:
            st.button(
                verdict, icon=icon, shortcut=key, key=f"v_{verdict}", on_click=say, args=(verdict,),
                help=f"{verdict} ({key})",
            )  # fmt: skip
        st.text_input("note", key="v_note", width=340)
        st.text_input("reviewer", key="v_reviewer", width=160)
        if st.button("Open in Replay", key="v_open"):
            go("replay", trace=row["id"])


def text(raw: str, limit: int = 20_000) -> str:
    """A long text as inert HTML, spaces and line breaks as they are."""
    return view.markup(prose(raw, limit))

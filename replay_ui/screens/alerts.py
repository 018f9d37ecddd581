"""Alerts: what fires, what is silenced, what was delivered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

import streamlit as st

from replay_ui import view
from replay_ui.client import Problem, listed
from replay_ui.session import gateway, plain, show, zone


def page() -> None:
    """The page."""
    answer = gateway().json("GET", "/v1/alerts")
    alerts = listed(answer, "alerts")
    firing = [a for a in alerts if a.get("state") == "firing"]
    others = [a for a in alerts if a.get("state") == "pending"]
    if firing:
        st.html(table("firing", firing))
        silence(firing)
    else:
        st.success("Nothing fires.")
    if others:
        st.html(table("about to fire", others))
    silenced(answer.get("silences") or [])
    history = answer.get("history") or []
    if history:
        st.html(table("history", [{**h, "since": h.get("ts")} for h in history]))
    deliveries()


def table(title: str, alerts: Sequence[Mapping[str, Any]]) -> str:
    """Alerts as lines: since when, name, what it says."""
    tz = zone()
    rows = []
    for a in alerts:
        words = a.get("annotations") or {}
        said = str(words.get("summary") or words.get("description") or "")
        quiet = ", silenced" if a.get("silenced_by") else ", inhibited" if a.get("inhibited_by") else ""
        name = f"<b>{view.inert(str(a.get('name')), 60)}</b>"
        state = escape(str(a.get("state"))) + quiet
        rows.append((view.when(a.get("since"), tz), name, state, view.inert(said, 300)))
    return view.table(("since", title, "state", ""), rows)


def silence(firing: Sequence[Mapping[str, Any]]) -> None:
    """Silence one alert for a while."""
    with st.popover("Silence", icon=":material/notifications_off:"):
        name = st.selectbox("alert", sorted({str(a["name"]) for a in firing}), key="n_name")
        hours = st.number_input("for hours", 0.5, 168.0, 2.0, key="n_hours")
        author = st.text_input("who", key="n_author")
        comment = st.text_input("why", key="n_comment")
        if st.button("Silence it", key="n_silence", disabled=not (author and comment)):
            said = {"author": author, "comment": comment, "duration_s": hours * 3600}
            act("POST", "/v1/alerts/silences", {"matchers": {"alertname": name}, **said})


def silenced(silences: Sequence[Mapping[str, Any]]) -> None:
    """The silences in force, each with its end."""
    if not silences:
        return
    st.html(view.dim("silences"))
    for s in silences:
        with st.container(horizontal=True, vertical_alignment="center"):
            what = ", ".join(f"{k}={v}" for k, v in (s.get("matchers") or {}).items())
            st.write(plain(f"{what} until {view.clock(s.get('ends_at'), zone())}: {s.get('comment') or ''}"))
            if st.button("End", key=f"n_end_{s['id']}"):
                act("DELETE", f"/v1/alerts/silences/{quote(str(s['id']), safe='')}", None)


def deliveries() -> None:
    """What the receivers were sent, and again where it failed."""
    try:
        answer = gateway().json("GET", "/v1/webhooks/deliveries")
    except Problem as problem:
        if problem.kind != "unsupported":
            show(problem)
        return
    rows = listed(answer, "deliveries")
    st.html(view.dim("deliveries"))
    if not rows:
        st.caption("Nothing has been delivered: no receiver is configured, or nothing has fired.")
        return
    for d in rows[:30]:
        with st.container(horizontal=True, vertical_alignment="center"):
            st.html(delivery(d))
            if d.get("state") != "delivered" and st.button("Send again", key=f"n_again_{d['id']}"):
                act("POST", f"/v1/webhooks/deliveries/{quote(str(d['id']), safe='')}/redeliver", None)


def delivery(d: Mapping[str, Any]) -> str:
    """One delivery as a line: when, to whom, about what, how it went."""
    tries = d.get("attempts") or 0
    how = f"{d.get('state')} after {tries} attempt{'s' * (tries != 1)}"
    if d.get("status") or d.get("error"):
        how += f" ({d.get('status') or ''} {d.get('error') or ''})"
    said = " · ".join(view.inert(str(part), 200) for part in (d.get("receiver"), d.get("subject"), how))
    return f"{view.when(d.get('created'), zone())} {said}"


def act(method: str, path: str, body: Any) -> None:
    """Do it, then look again."""
    try:
        gateway().ask(method, path, body=body)
    except Problem as problem:
        show(problem)
    else:
        st.rerun()

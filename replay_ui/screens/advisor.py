"""Advisor: what each threshold would keep, and how often the large model would agree, from live audits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from time import time
from typing import Any

import altair as alt
import streamlit as st

from replay_ui import figures, view
from replay_ui.client import Problem, listed
from replay_ui.listing import AGES
from replay_ui.session import gateway, zone


def page() -> None:
    """The page."""
    with st.container(horizontal=True, vertical_alignment="bottom", key="a_filters"):
        arm = st.selectbox("arm", ("any", "stable", "canary"), key="a_arm", width=130)
        age = st.selectbox("last", ("any", *AGES), key="a_age", width=130)
        words = st.text_input("prompt contains", key="a_q", width=240)
    params: dict[str, Any] = {}
    if arm != "any":
        params["arm"] = arm
    if age != "any":
        params["since"] = f"{time() - AGES[age]:.0f}"
    if words:
        params["q"] = words
    answer = gateway().json("GET", "/v1/advisor", params=params)
    curve = answer.get("curve") or []
    labels = int(answer.get("labels") or 0)
    if not curve or not labels:
        st.info(
            "No audited tokens match, so there is nothing to advise from. Widen the filter, or raise "
            "`audit_rate` so that the large model scores more of what was not checked."
        )
    else:
        body(curve, answer)
    diagnosis(params)


@st.fragment
def body(curve: Sequence[Mapping[str, Any]], answer: Mapping[str, Any]) -> None:
    """The curve, a slider that reads both axes, and where the labels come from."""
    current = answer.get("current")
    start = 0.5 if current is None else float(current)
    st.session_state.setdefault("a_threshold", start)
    left, right = st.columns([5, 2], gap="large")
    with right:
        chosen = st.slider("threshold", 0.0, 1.0, step=0.01, key="a_threshold")
        point = figures.at_threshold(curve, chosen) or {}
        band = ""
        if point.get("low") is not None:
            band = f"95 % interval {view.number(point['low'], 4)} to {view.number(point['high'], 4)}"
        st.html(
            '<div class="tt-tiles">'
            f"{view.tile('kept by the small model', view.share(point.get('kept_share')))}"
            f"{view.tile('large model agrees', view.number(point.get('agreement'), 4))}</div>"
            f'<p class="tt-dim">{band}</p><p>{escape(_source(answer))}</p>'
        )
    with left, st.container(key="a_chart"):
        st.altair_chart(chart(curve, chosen, answer), width="stretch")


def diagnosis(params: Mapping[str, Any]) -> None:
    """The usual causes of slowness and of lost quality, each with its measured share and what would help."""
    try:
        findings = listed(gateway().json("GET", "/v1/diagnose", params=params), "findings")
    except Problem as problem:
        if problem.kind != "unsupported":
            raise
        st.html(view.dim("This gateway does not diagnose: upgrade it to see the usual causes here."))
        return
    rows, marks = [], []
    for f in findings:
        share, limit = f.get("share"), float(f.get("limit") or 1.0)
        bar = view.evidence("", "against", min((share or 0.0) / limit, 1.0), view.share(share))
        rows.append(
            (
                view.inert(str(f.get("cause")), 80),
                f'<div class="tt-evidence tt-short">{bar}</div>',
                view.inert(str(f.get("evidence") or ""), 300),
                view.inert(str(f.get("change") or ""), 300),
            )
        )
        marks.append(share is not None and share >= limit)
    if rows:
        st.html(
            view.table(
                ("cause", "share, red line: worth acting on", "evidence", "what would help"), rows, marks
            )
        )


def _source(answer: Mapping[str, Any]) -> str:
    tz = zone()
    said = f"From {int(answer.get('labels') or 0):,} labels"
    if answer.get("requests"):
        said += f" in {int(answer['requests']):,} requests"
    if answer.get("since") is not None:
        said += f", {view.clock(answer['since'], tz)} to {view.clock(answer.get('until'), tz)}"
    return said + "."


def chart(curve: Sequence[Mapping[str, Any]], chosen: float, answer: Mapping[str, Any]) -> Any:
    """Agreement with its band on the left axis, the kept share on the right; thresholds as rules."""
    points = alt.Data(values=[dict(p) for p in curve])
    # A threshold that keeps next to nothing has an interval that would flatten all the others.
    low = min((p["agreement"] for p in curve if p.get("agreement") is not None), default=0.8)
    x = alt.X("threshold:Q", title="threshold", scale=alt.Scale(domain=[0, 1]))
    scale = alt.Scale(domain=[max(0.0, low - 0.05), 1.0], clamp=True)
    band = alt.Chart(points).mark_area(opacity=0.2, color="#0072B2").encode(
        x=x, y=alt.Y("low:Q", scale=scale, title="agreement"), y2="high:Q"
    )  # fmt: skip
    agreement = alt.Chart(points).mark_line(color="#0072B2").encode(
        x=x, y=alt.Y("agreement:Q", scale=scale, axis=alt.Axis(titleColor="#0072B2"))
    )  # fmt: skip
    kept = alt.Chart(points).mark_line(color="#E69F00", strokeDash=[5, 3]).encode(
        x=x,
        y=alt.Y(
            "kept_share:Q", title="kept share", scale=alt.Scale(domain=[0, 1]),
            axis=alt.Axis(titleColor="#E69F00", orient="right", format="%"),
        ),
    )  # fmt: skip
    marks = [{"threshold": chosen, "what": "slider"}]
    marks += [
        {"threshold": answer[name], "what": what}
        for name, what in (("current", "today"), ("calibrated", "calibrated"))
        if answer.get(name) is not None
    ]
    rules = alt.Chart(alt.Data(values=marks)).mark_rule(strokeWidth=1.5).encode(
        x="threshold:Q", strokeDash=alt.StrokeDash("what:N", title=None), color=alt.value("#888")
    )  # fmt: skip
    return alt.layer(alt.layer(band, agreement, rules), kept).resolve_scale(y="independent").properties(
        height=430
    )  # fmt: skip

"""Live: what the gateway is doing now, and over the last fifteen minutes."""

from __future__ import annotations

from collections import deque
from datetime import datetime
from time import time
from typing import Any

import altair as alt
import streamlit as st

from replay_ui import figures, view
from replay_ui.client import Problem
from replay_ui.session import gateway, guard, zone

TIERS = ("small", "middle", "middle2", "middle3", "large", "lookup")
EVERY_S = 3.0
WINDOW_S = 900.0
COLOURS = {"small": "#999999", "middle": "#56B4E9", "large": "#0072B2", "lookup": "#009E73"}


def page() -> None:
    """The page; only the fragment reruns, so the reader keeps the scroll position."""
    refreshing()


@st.fragment(run_every=EVERY_S)
def refreshing() -> None:
    """Ask, then draw."""
    guard(draw)()


def draw() -> None:
    """Tiles from the metrics, the last fifteen minutes from the traces."""
    now = time()
    found = figures.samples(gateway().ask("GET", "/metrics").text)
    seen: deque[tuple[float, figures.Samples]] = st.session_state.setdefault("l_seen", deque(maxlen=400))
    seen.append((now, found))
    while now - seen[0][0] > WINDOW_S:
        seen.popleft()
    st.html(tiles(seen))
    left, right = st.columns([3, 2], gap="medium")
    with left:
        st.html(view.dim(f"tokens a second by who wrote them, until {view.clock(now, zone(), False)}"))
        summaries = recent(now)
        rows = figures.throughput(summaries, now, WINDOW_S)
        if any(row["tokens"] for row in rows):
            with st.container(key="l_chart"):
                st.altair_chart(chart(rows), width="stretch")
        else:
            st.info("No answer ended in the last 15 minutes. Send the gateway a request to see it here.")
    with right:
        st.html(drift(found))


def recent(now: float) -> list[dict[str, Any]]:
    """Summaries of the last fifteen minutes, at most a thousand; asked every ten seconds."""
    asked, rows = st.session_state.get("l_traces", (0.0, []))
    if now - asked > 10:
        try:
            rows, _ = gateway().traces(limit=1000, since=f"{now - WINDOW_S:.0f}")
        except Problem:
            rows = []
        st.session_state["l_traces"] = (now, rows)
    return list(rows)


def tiles(seen: deque[tuple[float, figures.Samples]]) -> str:
    """The numbers of now. Rates are over the last half minute that was watched."""
    now, found = seen[-1]
    before_at, before = next((s for s in seen if now - s[0] <= 30), seen[0])
    span = now - before_at

    def grown(name: str, **labels: str) -> float | None:
        return figures.rate(figures.total(before, name, **labels), figures.total(found, name, **labels), span)

    tokens = {tier: grown("generation_tokens_total", tier=tier) or 0.0 for tier in TIERS}
    whole = sum(tokens.values())
    drafted, accepted = (
        grown("spec_decode_num_draft_tokens_total"),
        grown("spec_decode_num_accepted_tokens_total"),
    )
    depth, dropped = figures.total(found, "tape_queue_depth"), figures.total(found, "tape_dropped_total")
    kv = figures.total(found, "kv_cache_usage_perc")
    facts = [
        ("tokens / s", view.number(whole, 1) if span else "watching"),
        ("not by the large model", view.share(1 - tokens["large"] / whole) if whole else view.DASH),
        (
            "draft acceptance",
            view.number(accepted / drafted) if drafted and accepted is not None else view.DASH,
        ),
        ("running", f"{figures.total(found, 'num_requests_running') or 0:g}"),
        ("waiting", f"{figures.total(found, 'num_requests_waiting') or 0:g}"),
        ("KV in use", view.share(kv)),
        ("tape queue", f"{depth or 0:g} rows"),
        ("tape dropped", f"{dropped or 0:g} rows"),
    ]
    cells = "".join(view.tile(name, value) for name, value in facts)
    return f'<div class="tt-tiles">{cells}</div>'


def drift(found: figures.Samples) -> str:
    """Drift evidence by metric, as a line toward its alarm at 1000."""
    series = found.get("drift_evidence", {})
    if not series:
        return '<div class="tt-dim">No drift evidence is kept: it needs audits and alert rules.</div>'
    lines = ""
    for labels, value in sorted(series.items()):
        name = dict(labels).get("metric", "?")
        lines += view.evidence(view.inert(name, 30), "against", figures.toward(value, 1000), f"{value:.3g}")
    return f'{view.dim("drift evidence, alarm at 1000")}<div class="tt-evidence">{lines}</div>'


def chart(rows: list[dict[str, Any]]) -> Any:
    """Stacked tokens a second."""
    tz = zone()
    values = [
        {**row, "time": datetime.fromtimestamp(row["ts"], tz).strftime("%Y-%m-%dT%H:%M:%S")} for row in rows
    ]
    return alt.Chart(alt.Data(values=values)).mark_area(interpolate="step").encode(
        x=alt.X("time:T", title=None, axis=alt.Axis(format="%H:%M")),
        y=alt.Y("tokens:Q", title="tokens / s", stack="zero"),
        color=alt.Color(
            "tier:N", title=None, scale=alt.Scale(domain=list(COLOURS), range=list(COLOURS.values()))
        ),
    ).properties(height=300)  # fmt: skip

"""The pages and what they share. Run by `streamlit run` (see serve.py)."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from replay_ui.screens import advisor, alerts, compare, live, replay, reviews, rollouts, traces
from replay_ui.session import PAGES, guard

HERE = Path(__file__).parent

st.set_page_config(page_title="tokentape", page_icon=str(HERE / "icon.svg"), layout="wide")
st.html(f"<style>{(HERE / 'style.css').read_text()}</style>")

for name, screen, icon in (
    ("traces", traces, "list"),
    ("replay", replay, "replay"),
    ("compare", compare, "compare_arrows"),
    ("advisor", advisor, "tune"),
    ("live", live, "monitoring"),
    ("reviews", reviews, "rate_review"),
    ("rollouts", rollouts, "alt_route"),
    ("alerts", alerts, "notifications"),
):
    PAGES[name] = st.Page(
        guard(screen.page),
        title=name.capitalize(),
        icon=f":material/{icon}:",
        url_path=name,
        default=name == "traces",
    )
st.navigation(list(PAGES.values()), position="top").run()

"""The permalink restores the view, and refuses nonsense quietly."""

from __future__ import annotations

from urllib.parse import parse_qsl

from hypothesis import given
from hypothesis import strategies as st

from replay_ui.link import COLOURS, View, read

views = st.builds(
    View,
    trace=st.text(min_size=1, max_size=20),
    choice=st.integers(0, 3),
    step=st.integers(0, 10_000),
    draft=st.none() | st.integers(0, 10_000),
    colour=st.sampled_from(COLOURS),
    drafts=st.booleans(),
    find=st.text(max_size=10),
    zoom=st.none() | st.tuples(st.integers(0, 50), st.integers(51, 999)),
    what_if=st.fixed_dictionaries(
        {}, optional={"threshold": st.sampled_from([0.0, 0.25, 0.8, 1.0]), "draft_length": st.integers(1, 32)}
    ),
)


@given(views)
def test_a_view_survives_its_own_link(view: View) -> None:
    assert read(dict(parse_qsl(view.query(), keep_blank_values=True))) == view


@given(
    st.dictionaries(
        st.sampled_from(["trace", "step", "zoom", "threshold", "draft", "choice"]), st.text(max_size=8)
    )
)
def test_nonsense_is_taken_as_not_said(query: dict[str, str]) -> None:
    view = read(query)
    assert view.step >= 0
    assert view.zoom is None or view.zoom[0] < view.zoom[1]
    assert read(dict(parse_qsl(view.query(), keep_blank_values=True))) == view

"""The list of traces."""

from __future__ import annotations

from datetime import UTC

import pytest
from fake_traces import NOW, TEXT, pieces, simulate, summary

from gateway.policy import Policy
from replay_ui import listing


def test_filters_come_from_the_url_and_nonsense_stays_out() -> None:
    query = {"arm": "canary", "finish_reason": "sideways", "age": "1 h", "q": "merge", "max_acceptance": "2"}
    assert listing.filters(query) == {"arm": "canary", "age": "1 h", "q": "merge"}
    assert listing.filters({"min_guard_hits": "3", "max_acceptance": "0.5"}) == {
        "min_guard_hits": "3",
        "max_acceptance": "0.5",
    }


def test_in_a_fleet_a_row_says_who_served_it() -> None:
    columns = simulate(pieces(TEXT), Policy(protect_first=4), seed=5)
    made = listing.rows([summary("x", columns, Policy(), gateway="west")], UTC)[0]["cells"][1]
    assert made["title"] == "x on west"
    assert listing.filters({"gateway": "west"}) == {"gateway": "west"}


def test_an_age_is_asked_as_since() -> None:
    assert listing.ask({"age": "1 h", "arm": "stable"}, now=10_000) == {"since": "6400", "arm": "stable"}


def test_chips_are_words() -> None:
    assert listing.chip("age", "7 d") == "last 7 d"
    assert listing.chip("arm", "canary") == "arm: canary"


def test_a_row_has_a_cell_a_column_and_hostile_text_is_inert() -> None:
    columns = simulate(pieces(TEXT), Policy(protect_first=4), seed=5)
    row = summary("x", columns, Policy(), prompt_preview="a\nb\u202e\x1b", guard_hits=2)
    (made,) = listing.rows([row], UTC)
    assert made["id"] == "x"
    assert len(made["cells"]) == len(listing.COLUMNS)
    by_name = dict(zip((name for name, _ in listing.COLUMNS), made["cells"], strict=True))
    assert by_name["time"]["title"].endswith("UTC")
    assert by_name["prompt"]["text"] == "a bU+202EESC"
    assert by_name["guards"] == {"text": "2", "kind": "warn"}
    assert by_name["small"]["share"] == 1 - row["large_tokens"] / 170
    assert len(by_name["gap"]["spark"]) <= 32


@pytest.mark.parametrize(("preview", "said"), [("", "empty"), (" \n", "empty"), (None, "not recorded")])
def test_an_empty_prompt_is_not_taken_for_one_left_out(preview: str | None, said: str) -> None:
    (made,) = listing.rows([{"id": "x", "received": NOW, "prompt_preview": preview}], UTC)
    assert made["cells"][1]["text"] == said


def test_a_running_trace_has_dashes_for_what_is_not_known() -> None:
    (made,) = listing.rows([{"id": "x", "received": NOW}], UTC)
    texts = [cell and cell.get("text") for cell in made["cells"]]
    assert "running" in texts
    assert texts.count("\u2013") >= 3

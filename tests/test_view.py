"""Rows -> what the pages say."""

from __future__ import annotations

from datetime import UTC
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from fake_traces import TEXT, pieces, simulate, summary

from gateway.policy import Policy
from replay_ui import view
from replay_ui.steps import Steps

POLICY = Policy(protect_first=4)


@pytest.fixture(scope="module")
def steps() -> Steps:
    return Steps.read(simulate(pieces(TEXT), POLICY, seed=5))


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "\u2013"), (0.0004, "0 ms"), (0.25, "250 ms"), (2.94, "2.9 s"), (150.0, "2.5 min")],
)
def test_durations_carry_the_unit_that_suits_them(value: float | None, expected: str) -> None:
    assert view.duration(value) == expected


def test_numbers_without_a_value_are_a_dash() -> None:
    assert view.number(None) == view.number(float("nan")) == view.share(None) == "\u2013"
    assert view.share(0.674) == "67 %"
    assert view.number(0.98123, 3) == "0.981"


def test_times_are_the_readers_own_with_utc_to_hover() -> None:
    # 2026-11-30 20:00:00 UTC, an hour later in Berlin
    assert view.clock(1796068800.0, ZoneInfo("Europe/Berlin")) == "Nov 30 21:00:00"
    assert view.utc(1796068800.0) == "2026-11-30 20:00:00 UTC"
    assert view.zone(None) is UTC
    assert view.zone("No/Such") is UTC


@pytest.mark.parametrize(
    "text", ["<b>x</b>", "<script>alert(1)</script>", "\u202eevil", "\x1b[2J", 'a"onload="']
)
def test_any_text_is_inert(text: str) -> None:
    drawn = view.inert(text).replace("<i>", "").replace("</i>", "")
    assert "<" not in drawn
    assert '"' not in drawn
    assert "\u202e" not in drawn
    assert "\x1b" not in drawn


def test_header_has_the_facts(steps: Steps) -> None:
    row = summary("chatcmpl-1", dict(steps.columns), POLICY)
    drawn = view.header(row, UTC)
    assert "170 tok" in drawn
    assert "exact" in drawn
    assert "stable / stable@" in drawn


def test_header_of_a_fork_names_its_parent(steps: Steps) -> None:
    row = summary("f", dict(steps.columns), POLICY, parent="<p>", forked_at=12)
    assert "forked from &lt;p&gt; at step 12" in view.header(row, UTC)


def test_a_whole_trace_has_no_warnings_and_a_cut_one_says_what_is_missing(steps: Steps) -> None:
    row = summary("x", dict(steps.columns), POLICY)
    assert view.warnings(row, steps) == []
    assert "dropped" in view.warnings({**row, "incomplete": True}, steps)[0]
    assert "still being written" in view.warnings({**row, "finish_reason": None}, steps)[0]
    assert view.warnings({**row, "completion_tokens": 200}, steps) == [
        "The tape holds 170 of 200 output tokens."
    ]
    assert "signals" in view.warnings({**row, "capture": "signals"}, steps)[0]


def test_find_marks_every_token_a_match_touches(steps: Steps) -> None:
    found = view.find(steps, "python function")
    assert b"".join(steps.tokens[p] for p in found) == b" Python function"
    assert view.find(steps, "") == []
    assert view.find(steps, "not in the answer") == []


def test_find_reaches_over_split_characters(steps: Steps) -> None:
    found = view.find(steps, "你好")
    assert b"".join(steps.tokens[p] for p in found).decode() == "你好"


def test_the_kept_share_is_of_output_positions_as_what_if_counts_them() -> None:
    """A kept draft and the bonus behind it; one refused, replaced, and what came behind thrown away; one
    deferred and one that rode along with it: two of five."""
    rows = [
        ("accepted", "keep"), ("bonus", "defer"), ("rejected", "keep"), ("discarded", "keep"),
        ("recovered", None), ("large", "defer"), ("bonus", None),
    ]  # fmt: skip
    columns: dict[str, list[Any]] = {name: [0] * len(rows) for name in ("seq", "idx", "token_id")}
    columns |= {"outcome": [o for o, _ in rows], "action": [a for _, a in rows]}
    assert view.kept_share(Steps.read(columns)) == 2 / 5
    given = {"seq": [0], "idx": [0], "token_id": [0], "outcome": ["forced"], "action": [None]}
    assert view.kept_share(Steps.read(given)) is None


def test_what_if_says_shares_flips_and_labels() -> None:
    answer = {
        "first_flip": 23,
        "flips": [23, 40],
        "estimate": {
            "kept_share": 0.52, "recorded_kept_share": 2 / 3,
            "agreement": 0.981, "low": 0.972, "high": 0.988, "labels": 1204,
        },
    }  # fmt: skip
    said, notes = view.what_if_sentence(answer, exact=False)
    assert said == "kept 67 % → 52 %; 2 flips, first at step 23"
    assert notes[0] == "est. agreement 0.981 [0.972, 0.988] from 1,204 labels"
    assert notes[1] == "beyond this point the text itself would differ; fork to see it"


def test_what_if_under_exact_says_why_nothing_greys() -> None:
    answer = {"first_flip": 3, "flips": [3], "estimate": {"kept_share": 0.5}}
    _, notes = view.what_if_sentence(answer, exact=True)
    assert "the text is the same whatever the settings" in notes[-1]


def test_what_if_without_flips() -> None:
    said, notes = view.what_if_sentence({"first_flip": None, "flips": []}, exact=False)
    assert said.endswith("no decision flips")
    assert notes == []


def test_what_if_says_how_far_the_decisions_are_exact() -> None:
    answer = {"first_flip": 3, "flips": [3, 9], "exact_until": 9, "unknown": [1]}
    _, notes = view.what_if_sentence(answer, exact=False)
    assert "up to step 9" in notes[1]
    assert notes[2] == "undecided where the small model said nothing: 1"

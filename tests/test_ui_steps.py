"""Walking through recorded steps."""

from __future__ import annotations

import pytest
from fake_traces import TEXT, pieces, simulate

from gateway.policy import Policy
from replay_ui.steps import Steps


def made(outcomes: str, gaps: list[float] | None = None) -> Steps:
    """Steps from one letter a row: a accepted, r rejected, R recovered, l large, d discarded."""
    names = {"a": "accepted", "r": "rejected", "R": "recovered", "l": "large", "d": "discarded"}
    idx, written = [], 0
    for letter in outcomes:
        idx.append(written)
        written += letter in "aRl"
    rows = len(outcomes)
    return Steps.read(
        {
            "seq": list(range(rows)),
            "idx": idx,
            "outcome": [names[x] for x in outcomes],
            "tier": ["large" if x in "Rl" else "small" for x in outcomes],
            "reason": ["loop_guard" if x == "l" else None for x in outcomes],
            "audit_agrees": [x != "r" for x in outcomes],
            "gap": gaps or [0.5] * rows,
            "token_bytes": ["YQ=="] * rows,
        }
    )


def test_rows_are_put_in_seq_order() -> None:
    steps = Steps.read(
        {"seq": [1, 0], "idx": [1, 0], "outcome": ["kept", "kept"], "token_bytes": ["Yg==", "YQ=="]}
    )
    assert steps.text == "ab"


def test_written_rows_are_the_output() -> None:
    columns = simulate(pieces(TEXT), Policy(protect_first=4), seed=5)
    steps = Steps.read(columns)
    assert steps.text == TEXT
    assert [steps.column("idx")[p] for p in steps.written] == list(range(len(steps.written)))


@pytest.mark.parametrize(
    ("at", "by", "drafts", "expected"),
    [
        (0, 1, False, 1),
        (1, 1, False, 4),  # over the rejected and the discarded draft
        (4, -1, False, 1),
        (1, 1, True, 2),
        (2, 1, False, 4),  # from a draft to the next written row
        (2, -1, False, 1),
        (0, -1, False, 0),
        (5, 10, False, 5),
        (5, -10, False, 0),
    ],
)
def test_moving_skips_drafts_unless_they_are_shown(at: int, by: int, drafts: bool, expected: int) -> None:
    assert made("aardRl").move(at, by, drafts) == expected


def test_jumps_go_both_ways_and_stay_where_there_is_nothing() -> None:
    steps = made("aarRaarRl")
    assert steps.jump(0, "rejection") == 3
    assert steps.jump(3, "rejection") == 7
    assert steps.jump(7, "rejection") == 7
    assert steps.jump(7, "rejection", back=True) == 3
    assert steps.jump(0, "large") == 3
    assert steps.jump(7, "guard") == 8
    assert steps.jump(0, "audit") == 2


def test_lowest_gap_goes_up_from_the_lowest() -> None:
    gaps = [0.9, 0.1, 0.5, 0.05] + [0.95] * 40
    steps = made("a" * 44, gaps)
    assert steps.jump(43, "lowest gap") == 3
    assert steps.jump(3, "lowest gap") == 1
    assert steps.jump(1, "lowest gap") == 2
    assert steps.jump(1, "lowest gap", back=True) == 3
    assert steps.jump(3, "lowest gap", back=True) == 3


def test_the_draft_a_recovered_token_replaced() -> None:
    steps = made("aardRl")
    assert steps.rejected_before(4) == 2
    assert steps.rejected_before(5) is None


def test_no_rows_is_no_error() -> None:
    steps = Steps.read({"seq": [], "idx": [], "outcome": [], "token_bytes": []})
    assert len(steps) == 0
    assert steps.move(0, 1) == 0
    assert steps.text == ""

"""The step panel of a trace with middle tiers: what each said, and who overruled whom."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.policy import Level, Policy
from replay_ui import figures, panel
from replay_ui.component import TIERS
from replay_ui.rules import policy_of
from replay_ui.steps import Steps

VIEW: dict[str, Any] = {
    "tier": "middle", "verdict": "rejected", "choice": 66, "p": 0.1, "top1_p": 0.7, "gap": 0.5,
    "topk_ids": [66, 65], "topk_logprobs": [-0.36, -2.3], "action": None, "reason": None, "score": None,
    "threshold": None,
}  # fmt: skip
REJECTED: dict[str, Any] = {
    "seq": 0, "idx": 0, "token_id": 65, "token_bytes": b"A", "tier": "small", "outcome": "rejected",
    "small_choice": 65, "overruled_by": "middle", "middle": [VIEW],
}  # fmt: skip
ACCEPTED: dict[str, Any] = {
    "seq": 1, "idx": 0, "token_id": 66, "token_bytes": b"B", "tier": "middle", "outcome": "accepted",
    "small_choice": 65, "large_choice": 66, "audit_agrees": True, "overruled_by": None,
    "middle": [
        VIEW | {
            "verdict": "recovered", "action": "keep", "reason": "confident", "score": 0.5, "threshold": 0.4,
        }
    ],
}  # fmt: skip


def steps() -> Steps:
    return Steps.read({name: [REJECTED.get(name), ACCEPTED[name]] for name in ACCEPTED})


def card(position: int) -> str:
    return panel.card(Policy(), steps(), position, panel.token_names(steps(), position, {}))


def test_the_draft_says_who_overruled_it_and_by_what() -> None:
    drawn = card(0)
    assert "overruled by middle" in drawn
    assert "refused the draft" in drawn
    assert '<u class="middle" style="width:69.8%">' in drawn


def test_the_token_instead_says_what_its_tier_decided() -> None:
    drawn = card(1)
    assert "put its own token → keep: confident, score 0.50 of 0.40" in drawn
    assert '<span class="tt-tier middle">middle</span>' in drawn
    assert "the large model agrees" in drawn
    assert "overruled" not in drawn


def test_a_bonus_that_rode_along_says_that_nobody_decided_it() -> None:
    row = {"seq": 1, "idx": 1, "token_id": 66, "token_bytes": b"B", "tier": "large", "outcome": "bonus"}
    rode = Steps.read({name: [value] for name, value in row.items()})
    drawn = panel.card(Policy(), rode, 0, {})
    assert "No rule decided this row" in drawn
    assert "rode along" in drawn


def test_tokens_that_only_a_middle_tier_named_are_asked_for() -> None:
    row = REJECTED | {"middle": [VIEW | {"topk_ids": [66, 99], "choice": 98}]}
    alone = Steps.read({name: [value] for name, value in row.items()})
    assert {66, 98, 99} <= set(panel.wanted_ids(alone, 0))


def test_a_trace_with_levels_has_a_readable_policy() -> None:
    policy = policy_of({"policy": {"threshold": 0.3, "middle": {"threshold": 0.6, "draft_length": None}}})
    assert policy == Policy(threshold=0.3, middle=Level(0.6))


def test_every_tier_has_a_place_in_the_strip_and_old_ones_kept_theirs() -> None:
    assert TIERS[:3] == ("small", "large", "lookup")
    assert set(TIERS) == {"small", "middle", "middle2", "middle3", "large", "lookup"}


@pytest.mark.parametrize(("middle", "tiers"), [(None, 3), (30, 4)])
def test_throughput_has_a_line_for_middle_tiers_where_there_are_any(middle: int | None, tiers: int) -> None:
    answers = [{"first_token": 1000.0, "finished": 1060.0, "small_tokens": 60, "middle_tokens": middle}]
    rows = figures.throughput(answers, now=1200.0, window_s=600.0, bucket_s=30.0)
    assert len({row["tier"] for row in rows}) == tiers
    assert sum(row["tokens"] * 30 for row in rows if row["tier"] == "middle") == pytest.approx(middle or 0)

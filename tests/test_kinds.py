"""Kinds of prompts: what words give away, and what a policy may do about it."""

from __future__ import annotations

import pytest

from gateway.core import Kind, Mode
from gateway.kinds import kind_of
from gateway.policy import Policy, admitted
from gateway.tuning.tasks import humaneval
from gateway.tuning.tasks.task import load_task


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ("Write a Python function that merges two sorted lists.", Kind.CODE),
        ("Explain what this does:\n\n```js\nx => x\n```", Kind.CODE),
        ("In SQL, find users who logged in twice.", Kind.CODE),
        ("def add(a, b):", Kind.CODE),
        ("Is Paris north of Rome? Answer yes or no.", Kind.SHORT),
        ("Name the capital of Norway. Reply with one word.", Kind.SHORT),
        ("Classify the mood of this review: it was fine.", Kind.SHORT),
        ("Prove that the square root of 2 is irrational.", Kind.REASONING),
        ("A tank fills in 6 hours. How long do two pipes take?", Kind.REASONING),
        ("What is 12 * 7?", Kind.REASONING),
        ("Write a letter to my neighbour about the trumpet.", Kind.OTHER),
        ("I improved the classroom and the queries of pupils.", Kind.OTHER),
        ("", Kind.OTHER),
    ],
)
def test_words_tell(prompt: str, kind: Kind) -> None:
    assert kind_of(prompt) is kind


def test_the_shipped_tasks_are_what_they_are() -> None:
    assert {p.detected for p in load_task("qa", allow_code_execution=False).prompts} == {Kind.SHORT}
    assert {p.detected for p in humaneval.prompts()} == {Kind.CODE}


def test_a_long_prompt_takes_no_time_to_speak_of() -> None:
    assert kind_of("write " * 200_000) is Kind.OTHER


@pytest.mark.parametrize("mode", list(Mode))
def test_only_what_would_be_routed_is_left_to_the_large_model(mode: Mode) -> None:
    policy = Policy(mode=mode, large_below=24, large_kinds=(Kind.SHORT,))
    alone = Mode.LARGE_ONLY if mode is Mode.ROUTED else mode
    assert admitted(policy, Kind.OTHER, 23).mode is alone
    assert admitted(policy, Kind.SHORT, 500).mode is alone
    assert admitted(policy, Kind.OTHER, 24) == policy
    assert admitted(Policy(mode=mode), Kind.SHORT, 1) == Policy(mode=mode)

"""Evaluation over the tiny pair: pairing, cost, agreement, kinds of prompt, the command's own checks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_tuning_curve import COSTS, prompts
from tiny_pair import TinyPair

from gateway import cli
from gateway.core import Accept, Kind, Mode, Tier
from gateway.policy import Policy
from gateway.tuning import evaluation_report as told
from gateway.tuning.evaluate import agreement, cost, groups, large_only, measured_speed, run_policy
from gateway.tuning.evaluation_report import Evaluation
from gateway.tuning.prompts import Prompt
from gateway.tuning.report import html
from gateway.tuning.run import Runner
from gateway.tuning.saved import Saved
from gateway.tuning.tasks.task import Task

TRUST = Policy(accept=Accept.TRUST, threshold=0.3, protect_first=2)
EXACT = Policy(accept=Accept.EXACT, threshold=0.3, protect_first=2)


def vowels(prompt: Prompt, answer: str) -> dict[str, float]:
    return {"vowels": float(sum(c in "aeiou" for c in answer) > 2)}


@pytest.fixture
def done(tiny_pair: TinyPair, tmp_path: Path) -> Evaluation:
    asked = [replace(p, kind="even" if i % 2 == 0 else "odd") for i, p in enumerate(prompts(8))]
    task = Task("vowels", asked, "vowels", True, vowels)
    runner = Runner(tiny_pair.engine(), 20)
    saved = Saved(tmp_path / "s.jsonl", {})
    policies = {
        "large_only": large_only(), "exact": EXACT, "trust": TRUST,
        "small_only": Policy(mode=Mode.SMALL_ONLY),
    }  # fmt: skip
    results = [
        run_policy(runner, saved, task, tiny_pair.tokenizer, name, policy)
        for name, policy in policies.items()
    ]
    speed = measured_speed(runner, task, policies, 1)
    return Evaluation(task, results, COSTS, speed)


def test_exact_serves_what_the_large_model_alone_does(done: Evaluation) -> None:
    base, exact, trust, small = done.results
    assert [a.tokens for a in exact.answers] == [a.tokens for a in base.answers]
    assert agreement(exact) == [1.0] * 8
    against = {one.a: one for one in done.comparisons if one.b == "large_only"}
    assert (against["exact"].difference.mean, against["exact"].test.p) == (0.0, 1.0)
    # The small model alone differs; trust lies between.
    mean = {r.name: sum(agreement(r)) / 8 for r in (trust, small)}
    assert mean["small_only"] < mean["trust"] < 1
    assert len(done.comparisons) == 3 + 3


def test_cost_is_counted_from_the_answers(done: Evaluation) -> None:
    base, exact, _, small = done.results
    alone = cost(base.answers, COSTS)
    assert (alone.large, alone.small, alone.small_passes) == (1.0, 0.0, 0.0)
    assert alone.speed == pytest.approx(1.0, abs=0.02)
    spent = cost(exact.answers, COSTS)
    tokens = sum(len(a.tokens) for a in exact.answers)
    assert spent.small == pytest.approx(sum(a.count(Tier.SMALL) for a in exact.answers) / tokens)
    assert spent.small + spent.lookup + spent.large == pytest.approx(1.0)
    assert spent.large_passes < 1.0
    assert cost(small.answers, COSTS).small == 1.0
    assert set(done.speed) == {"large_only", "exact", "trust", "small_only"}


def test_groups_part_the_prompts(done: Evaluation) -> None:
    found = groups(done.task, done.results[2], done.results[0], COSTS)
    assert {g.name: g.num_prompts for g in found} == {
        "answers of 17 to 64 tokens": 8,
        "detected other": 8,
        "kind even": 4,
        "kind odd": 4,
    }
    both = [g for g in found if g.name.startswith("kind")]
    assert sum(g.agreement for g in both) / 2 == pytest.approx(sum(agreement(done.results[2])) / 8)
    assert all(g.pays is (g.cost.speed >= 1.05) for g in found)


def test_reports_hold_every_number(done: Evaluation) -> None:
    page = html("Evaluation", told.sections(done, ["about the run"]))
    body = told.as_json(done, {"prompts": 8})
    assert json.loads(json.dumps(body))["policies"]["trust"]["policy_hash"] == TRUST.hash
    assert len(body["policies"]["exact"]["prompts"]) == 8
    header, rows = told.policies_table(done)
    assert [row[0] for row in rows] == ["large_only", "exact", "trust", "small_only"]
    for cell in (*header, *rows[2]):
        assert cell in page
    lines = told.text((header, rows)).splitlines()
    assert len(lines) == 5


def test_a_task_without_a_metric_is_agreement_alone(tiny_pair: TinyPair, tmp_path: Path) -> None:
    task = Task("mine", prompts(3), None, False, lambda prompt, answer: {})
    runner, saved = Runner(tiny_pair.engine(), 8), Saved(tmp_path / "s.jsonl", {})
    results = [
        run_policy(runner, saved, task, tiny_pair.tokenizer, name, policy)
        for name, policy in (("large_only", large_only()), ("trust", TRUST))
    ]
    done = Evaluation(task, results, COSTS, {})
    assert done.comparisons == []
    assert [section.heading for section in told.sections(done, [])] == [
        "Policies",
        "By kind of prompt: trust",
    ]
    assert [row[0] for row in told.groups_table(done, results[1])[1]] == [
        "answers of up to 16 tokens",
        "detected other",
    ]


def test_kinds_left_to_the_large_model_are_its_alone(tiny_pair: TinyPair, tmp_path: Path) -> None:
    """A policy's rule holds in evaluation as it would when served."""
    short = Prompt("s", "", ({"role": "user", "content": "Answer yes or no: is it late?"},))
    task = Task("mine", [*prompts(3), short], None, False, lambda prompt, answer: {})
    runner, saved = Runner(tiny_pair.engine(), 12), Saved(tmp_path / "s.jsonl", {})
    rule = replace(TRUST, protect_first=0, large_kinds=(Kind.SHORT,))
    result = run_policy(runner, saved, task, tiny_pair.tokenizer, "rule", rule)
    by_large = [answer.count(Tier.LARGE) / len(answer.tokens) for answer in result.answers]
    assert by_large[3] == 1.0
    assert max(by_large[:3]) < 1.0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--task", "humaneval", "--policy", "stable"], "--allow-code-execution"),
        (["--task", "nothing", "--policy", "stable"], "--task"),
        (["--task", "qa", "--policy", "nothing"], "--policy"),
        (["--task", "qa", "--policy", "stable", "--limit", "0"], "--limit"),
        (["--task", "qa", "--policy", "stable", "--out", "nowhere/e.html"], "--out"),
    ],
)
def test_usage_errors(options: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evaluate", *options]) == 2
    assert named in capsys.readouterr().err

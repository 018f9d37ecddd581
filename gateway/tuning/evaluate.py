"""Policies on a task, paired with the large model alone: quality, agreement, cost, by kind of prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gateway.core import Accept, Mode, Tier
from gateway.policy import Policy
from gateway.progress import progress
from gateway.text import Tokenizer
from gateway.tuning.compare import Difference, McNemar, mcnemar, paired
from gateway.tuning.curve import Costs
from gateway.tuning.run import Answer, Runner, disagreement
from gateway.tuning.saved import Saved
from gateway.tuning.tasks.task import Task

LARGE_ONLY = "large_only"
LENGTHS = ((16, "up to 16 tokens"), (64, "17 to 64 tokens"), (10**9, "over 64 tokens"))
SPEED_WORTH = 1.05
"""Predicted speed-up below which routing a kind of prompt does not pay."""


@dataclass(frozen=True, slots=True)
class Result:
    """One policy on every prompt, in the task's order. scores: metrics of each answer."""

    name: str
    policy: Policy
    answers: Sequence[Answer]
    scores: Sequence[Mapping[str, float]]

    def mean(self, metric: str) -> float:
        """Mean of a metric over the prompts."""
        return sum(score[metric] for score in self.scores) / len(self.scores)


@dataclass(frozen=True, slots=True)
class Cost:
    """Shares of output tokens by tier, passes per output token; speed: predicted over large-only, a request
    at a time."""

    small: float
    lookup: float
    large: float
    large_passes: float
    small_passes: float
    tokens: float
    speed: float


@dataclass(frozen=True, slots=True)
class Versus:
    """a against b on the main metric: mean difference with interval, McNemar's test where it is 0 or 1."""

    a: str
    b: str
    difference: Difference
    test: McNemar | None


def run_policy(
    runner: Runner, saved: Saved, task: Task, tokenizer: Tokenizer, name: str, policy: Policy
) -> Result:
    """Answer every prompt under a policy, and score the answers."""
    answers = saved.run(runner, task.prompts, policy, name)
    scores: list[Mapping[str, float]] = []
    with progress(f"{name}: scoring", len(answers), "") as advance:
        for prompt, answer in zip(task.prompts, answers, strict=True):
            scores.append(task.score(prompt, tokenizer.decode(answer.tokens)))
            advance(1)
    return Result(name, policy, answers, scores)


def large_only() -> Policy:
    """The large model alone."""
    return Policy(mode=Mode.LARGE_ONLY)


def agreement(result: Result) -> list[float]:
    """Per prompt: 1 - disagreement over all output tokens; what `exact` drafts wrongly is not served."""
    served = result.policy
    if served.verified and served.accept is Accept.EXACT:
        return [1.0] * len(result.answers)
    return [1 - disagreement(answer, served) for answer in result.answers]


def same_answer(result: Result, base: Result) -> float:
    """Share of prompts whose tokens are exactly the base's."""
    pairs = zip(result.answers, base.answers, strict=True)
    return sum(a.tokens == b.tokens for a, b in pairs) / len(result.answers)


def cost(answers: Sequence[Answer], costs: Costs) -> Cost:
    """What answers took."""
    counts = {tier: sum(answer.count(tier) for answer in answers) for tier in Tier}
    total = max(1, sum(counts.values()))
    large = sum(answer.large_passes for answer in answers)
    small = sum(answer.small_passes for answer in answers)
    per_large_pass = max(1.0, total / large) if large else 1.0
    ms = large * costs[Tier.LARGE](per_large_pass) + small * costs[Tier.SMALL](1)
    return Cost(
        small=counts[Tier.SMALL] / total,
        lookup=counts[Tier.LOOKUP] / total,
        large=counts[Tier.LARGE] / total,
        large_passes=large / total,
        small_passes=small / total,
        tokens=total / len(answers),
        speed=total * costs[Tier.LARGE](1) / ms if ms else 1.0,
    )


def versus(task: Task, a: Result, b: Result) -> Versus | None:
    """a compared with b, prompt by prompt; None for a task without a metric."""
    if task.main is None:
        return None
    x = [score[task.main] for score in a.scores]
    y = [score[task.main] for score in b.scores]
    test = mcnemar([v >= 0.5 for v in x], [v >= 0.5 for v in y]) if task.binary else None
    return Versus(a.name, b.name, paired(x, y), test)


@dataclass(frozen=True, slots=True)
class Group:
    """Prompts of one kind or answer length: how many, the main metric by policy name, the policy's cost and
    agreement, and whether routing them pays."""

    name: str
    num_prompts: int
    metric: Mapping[str, float]
    agreement: float | None
    cost: Cost
    pays: bool


def groups(task: Task, routed: Result, base: Result, costs: Costs) -> list[Group]:
    """Results by kind of prompt, by the kind that a gateway would tell (which a policy's large_kinds may
    name), and by length of the large model's answer."""
    members: dict[str, list[int]] = {}
    for i, prompt in enumerate(task.prompts):
        if prompt.kind:
            members.setdefault(f"kind {prompt.kind}", []).append(i)
        members.setdefault(f"detected {prompt.detected}", []).append(i)
        length = len(base.answers[i].tokens)
        label = next(name for limit, name in LENGTHS if length <= limit)
        members.setdefault(f"answers of {label}", []).append(i)
    agreed = agreement(routed)
    found = []
    for name, chosen in sorted(members.items()):
        spent = cost([routed.answers[i] for i in chosen], costs)
        metric = {}
        if task.main is not None:
            for result in (base, routed):
                metric[result.name] = sum(result.scores[i][task.main] for i in chosen) / len(chosen)
        mean = sum(agreed[i] for i in chosen) / len(chosen) if agreed else None
        found.append(Group(name, len(chosen), metric, mean, spent, spent.speed >= SPEED_WORTH))
    return found


def measured_speed(
    runner: Runner, task: Task, policies: Mapping[str, Policy], num_prompts: int
) -> dict[str, float]:
    """Output tokens per second by policy, unaudited, one request at a time; they take turns per prompt."""
    alone = replace(runner, audits=False)
    tokens = dict.fromkeys(policies, 0)
    seconds = dict.fromkeys(policies, 0.0)
    for prompt in task.prompts[:num_prompts]:
        for name, policy in policies.items():
            (answer,) = alone.run([prompt], policy)
            tokens[name] += len(answer.tokens)
            seconds[name] += alone.spent.wall_s
    return {name: tokens[name] / seconds[name] for name in policies if seconds[name]}

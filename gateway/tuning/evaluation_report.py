"""What `tokentape evaluate` shows: text columns, JSON and the sections of the HTML report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gateway.policy import settings
from gateway.tuning.compare import paired
from gateway.tuning.curve import Costs
from gateway.tuning.evaluate import Group, Result, Versus, agreement, cost, groups, same_answer, versus
from gateway.tuning.report import Section, bars_png, inline
from gateway.tuning.tasks.task import Task

Table = tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results, the large model alone first; speed: measured tokens/s by policy name."""

    task: Task
    results: Sequence[Result]
    costs: Costs
    speed: Mapping[str, float]

    @property
    def comparisons(self) -> list[Versus]:
        """Every policy against the large model alone, then the policies among themselves."""
        base, *others = self.results
        pairs = [(other, base) for other in others]
        pairs += [(a, b) for i, a in enumerate(others) for b in others[i + 1 :]]
        found = (versus(self.task, a, b) for a, b in pairs)
        return [one for one in found if one is not None]

    def groups(self, result: Result) -> list[Group]:
        """A policy's results by kind of prompt and length of answer."""
        return groups(self.task, result, self.results[0], self.costs)


def policies_table(done: Evaluation) -> Table:
    """One row a policy."""
    metrics = tuple(done.results[0].scores[0]) if done.results[0].scores else ()
    header = (
        "policy", *metrics, "agreement", "same answer", "small", "lookup", "large", "large passes/token",
        "tokens/answer", "speed (predicted)", "tokens/s (measured)",
    )  # fmt: skip
    rows = []
    for result in done.results:
        spent, agreed = cost(result.answers, done.costs), agreement(result)
        measured = done.speed.get(result.name)
        rows.append(
            (
                result.name,
                *(f"{result.mean(metric):.1%}" for metric in metrics),
                f"{sum(agreed) / len(agreed):.2%}",
                f"{same_answer(result, done.results[0]):.1%}",
                f"{spent.small:.1%}",
                f"{spent.lookup:.1%}",
                f"{spent.large:.1%}",
                f"{spent.large_passes:.3f}",
                f"{spent.tokens:.1f}",
                f"{spent.speed:.2f}x",
                "" if measured is None else f"{measured:.1f}",
            )
        )
    return header, tuple(rows)


def comparisons_table(done: Evaluation) -> Table:
    """One row a pair."""
    rows = []
    for one in done.comparisons:
        d, t = one.difference, one.test
        tested = ("", "", "") if t is None else (str(t.only_a), str(t.only_b), f"{t.p:.3g}")
        rows.append((f"{one.a} - {one.b}", f"{d.mean:+.1%}", f"[{d.low:+.1%}, {d.high:+.1%}]", *tested))
    metric = done.task.main or ""
    header = ("pair", metric, "95 % interval", "only first", "only second", "McNemar p")
    return header, tuple(rows)


def groups_table(done: Evaluation, result: Result) -> Table:
    """One row a kind of prompt or answer length."""
    base = done.results[0].name
    metric = done.task.main
    rows = []
    for group in done.groups(result):
        scores = (group.metric[base], group.metric[result.name]) if metric else ()
        rows.append(
            (
                group.name,
                str(group.num_prompts),
                *(f"{score:.1%}" for score in scores),
                "" if group.agreement is None else f"{group.agreement:.2%}",
                f"{group.cost.large:.1%}",
                f"{group.cost.speed:.2f}x",
                "yes" if group.pays else "no: large model alone",
            )
        )
    named = (f"{metric}, {base}", f"{metric}, {result.name}") if metric else ()
    header = ("prompts", "number", *named, "agreement", "large", "speed (predicted)", "routing pays")
    return header, tuple(rows)


def text(table: Table) -> str:
    """A table as columns of text, the first aligned left."""
    header, rows = table
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    )


def sections(done: Evaluation, about: Sequence[str]) -> list[Section]:
    """The HTML report."""
    found = [Section("Policies", tuple(about), *policies_table(done), image=_bars(done))]
    if done.comparisons:
        line = "Differences are paired by prompt; intervals are bootstrapped over prompts."
        found.append(Section("Compared", (line,), *comparisons_table(done)))
    found += [
        Section(f"By kind of prompt: {result.name}", (), *groups_table(done, result))
        for result in done.results[1:]
    ]
    return found


def as_json(done: Evaluation, about: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, for machines: means, intervals, and each prompt's scores, agreement and tokens."""
    policies = {}
    base = done.results[0]
    for result in done.results:
        agreed = agreement(result)
        policies[result.name] = {
            "policy": settings(result.policy),
            "policy_hash": result.policy.hash,
            "metrics": {metric: result.mean(metric) for metric in result.scores[0]},
            "agreement": asdict(paired(agreed, [0.0] * len(agreed))),
            "same_answer": same_answer(result, base),
            "cost": asdict(cost(result.answers, done.costs)),
            "tokens_per_s": done.speed.get(result.name),
            "groups": [asdict(group) for group in done.groups(result)],
            "prompts": [
                {
                    "id": prompt.id,
                    "kind": prompt.kind,
                    "scores": dict(score),
                    "agreement": share,
                    "tokens": len(answer.tokens),
                }
                for prompt, score, share, answer in zip(
                    done.task.prompts, result.scores, agreed, result.answers, strict=True
                )
            ],
        }
    return {
        **about,
        "task": done.task.name,
        "metric": done.task.main,
        "policies": policies,
        "comparisons": [asdict(one) for one in done.comparisons],
    }


def _bars(done: Evaluation) -> str:
    names = [result.name for result in done.results]
    if done.task.main is None:
        means = [100 * sum(a) / len(a) for a in map(agreement, done.results)]
        return inline(bars_png("Agreement with the large model", names, means, "% of tokens"))
    means = [100 * result.mean(done.task.main) for result in done.results]
    return inline(bars_png(done.task.name, names, means, f"{done.task.main}, %"))

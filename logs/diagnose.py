"""Diagnose: why is it slow, why is quality down. Each usual cause with its share, measured on the tape."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pyarrow as pa

from gateway.policy import Policy
from logs.advisor import curve
from logs.labels import labelled
from logs.reader import FILTERED, Reader, TraceFilter

HARD_ACCEPTANCE = 0.5
"""A request whose drafts are accepted less often than this is one the small model is unfit for."""
GOOD_AGREEMENT = 0.98
"""The agreement a suggested threshold aims at."""
MIN_LABELS = 30
"""Labels below which no threshold is suggested."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause: share (0..1, None if nothing measured it) of `of`; noticed: it reaches `limit`.

    evidence: the numbers behind it. change: what would help, naming the setting.
    """

    cause: str
    share: float | None
    of: str
    limit: float
    evidence: str
    change: str

    @property
    def noticed(self) -> bool:
        """Whether it is worth acting on."""
        return self.share is not None and self.share >= self.limit


def diagnose(reader: Reader, policy: Policy, filters: TraceFilter | None = None) -> list[Finding]:
    """Every usual cause over the traces that the filters let through, the most pressing first.

    policy is the one in force; passes are those of the same time span (they belong to no single trace).
    """
    facts = _facts(reader, filters or TraceFilter())
    if not facts["requests"]:
        return []
    findings = [
        _too_loose(reader, policy, filters, facts),
        _unfit(facts),
        _too_hard(facts),
        _protected(policy, facts),
        _loops(facts),
        _router_overhead(facts),
        _batching(facts),
        _cache_churn(facts),
        _queue(facts),
        _waiting(facts),
    ]
    return sorted(findings, key=lambda f: -(f.share / f.limit if f.share is not None else -1.0))


def _plain(found: pa.Table) -> list[dict[str, Any]]:
    """Rows as Python values; DuckDB's sums of integers come as decimals."""
    return [
        {name: int(value) if isinstance(value, Decimal) else value for name, value in row.items()}
        for row in found.to_pylist()
    ]


def _facts(reader: Reader, filters: TraceFilter) -> dict[str, Any]:
    """The sums that the findings are made of."""
    facts: dict[str, Any]
    where, values = filters.where()
    names = (
        *FILTERED, "admitted", "first_token", "finished", "prompt_tokens", "completion_tokens",
        "protected_tokens", "num_draft_tokens", "num_accepted_draft_tokens", "large_passes", "small_passes",
    )  # fmt: skip
    requests = f"(SELECT * FROM {reader.sql('requests', names)} WHERE {where})"
    unfit = f"draft_acceptance_rate < {HARD_ACCEPTANCE}"
    facts = _plain(
        reader.query(
            f"""
        SELECT count(*) AS requests, coalesce(sum(completion_tokens), 0) AS output,
               coalesce(sum(prompt_tokens), 0) AS prompt, coalesce(sum(protected_tokens), 0) AS protected,
               coalesce(sum(num_draft_tokens), 0) AS drafted,
               coalesce(sum(num_accepted_draft_tokens), 0) AS accepted,
               coalesce(sum(completion_tokens) FILTER ({unfit}), 0) AS unfit,
               count(*) FILTER ({unfit}) AS unfit_requests,
               coalesce(sum(guard_hits), 0) AS guard_hits,
               count(*) FILTER (finish_reason = 'length' AND guard_hits > 0) AS looped,
               coalesce(sum(admitted - received), 0) AS queued_s,
               coalesce(sum(finished - received), 0) AS total_s,
               coalesce(sum(finished - admitted), 0) AS running_s,
               coalesce(sum(large_passes), 0) AS large_passes, coalesce(sum(small_passes), 0) AS small_passes,
               min(admitted) AS since, max(finished) AS until
        FROM {requests} WHERE finished IS NOT NULL
        """,
            values,
        )
    )[0]
    passes = reader.sql("passes", ("tier", "rows", "tokens", "ms", "host_ms", "ts"))
    by_tier = _plain(
        reader.query(
            f"SELECT tier, count(*) AS passes, sum(rows) AS rows, sum(tokens) AS tokens, sum(ms) AS ms,"
            f" sum(host_ms) AS host_ms FROM {passes} WHERE ts BETWEEN ? AND ? GROUP BY tier",
            [facts["since"] or 0.0, (facts["until"] or 0.0) + 1.0],
        )
    )
    facts["passes"] = {row["tier"]: row for row in by_tier}
    steps = reader.sql("steps", ("trace_no", "reason", "outcome"))
    reasons = reader.query(
        f"SELECT reason, count(*) AS n FROM {steps} WHERE reason IS NOT NULL"
        " AND outcome NOT IN ('rejected', 'discarded')"
        f" AND trace_no IN (SELECT trace_no FROM {requests}) GROUP BY reason",
        values,
    ).to_pylist()
    facts["reasons"] = {row["reason"]: row["n"] for row in reasons}
    return facts


def _too_loose(reader: Reader, policy: Policy, filters: TraceFilter | None, facts: dict[str, Any]) -> Finding:
    found = labelled(reader, policy, filters)
    points = curve(found, (policy.threshold,))
    agreement, labels = (points[0].agreement, points[0].labels) if points else (None, 0)
    change = "Raise audit_rate: there are no labels to judge the threshold by."
    if agreement is not None:
        good = [p for p in curve(found) if p.labels >= MIN_LABELS and (p.agreement or 0.0) >= GOOD_AGREEMENT]
        change = (
            f"Raise threshold to {good[0].threshold:g}: {good[0].kept_share:.0%} of proposals would be kept, "
            f"{good[0].agreement:.1%} of them the large model's own."
            if good
            else "No threshold reaches 98 % agreement here: use a verified accept rule or large_only."
        )
    return Finding(
        "threshold_too_loose",
        None if agreement is None else 1 - agreement,
        "proposals at or above the threshold that the large model would not have written",
        0.05,
        f"{labels} labels at threshold {policy.threshold:g} or above",
        change,
    )


def _unfit(facts: dict[str, Any]) -> Finding:
    return Finding(
        "small_model_unfit",
        _share(facts["unfit"], facts["output"]),
        f"output tokens in requests whose drafts are accepted less than {HARD_ACCEPTANCE:.0%} of the time",
        0.2,
        f"{facts['unfit_requests']} of {facts['requests']} requests; "
        f"{facts['accepted']} of {facts['drafted']} drafts accepted over all",
        "Leave that kind of prompt to the large model (large_kinds), or bring a small model nearer to it.",
    )


def _too_hard(facts: dict[str, Any]) -> Finding:
    low = facts["reasons"].get("low_confidence", 0)
    return Finding(
        "task_too_hard",
        _share(low, facts["output"]),
        "output tokens deferred because the small model was not sure",
        0.4,
        f"{low} of {facts['output']} output tokens",
        "Little is left to route: lower threshold if agreement allows (see the advisor), else large_only.",
    )


def _protected(policy: Policy, facts: dict[str, Any]) -> Finding:
    return Finding(
        "answers_too_short",
        _share(facts["protected"], facts["output"]),
        "output tokens in the protected prefix",
        0.3,
        f"{facts['protected']} of {facts['output']} output tokens, protect_first {policy.protect_first}",
        "Lower protect_first, or leave short answers to the large model alone (large_below).",
    )


def _loops(facts: dict[str, Any]) -> Finding:
    return Finding(
        "loops",
        _share(facts["guard_hits"], facts["output"]),
        "output positions where the loop guard stepped in",
        0.02,
        f"{facts['guard_hits']} guard hits; {facts['looped']} answers with some ran into max_tokens",
        "Raise small_repetition_penalty or threshold; lower loop_limit to hand loops over sooner.",
    )


def _router_overhead(facts: dict[str, Any]) -> Finding:
    ms, host = _total(facts, "ms"), _total(facts, "host_ms")
    return Finding(
        "router_overhead",
        _share(host, ms + host),
        "engine time outside the models",
        0.2,
        f"{host / 1e3:.1f} s around the models, {ms / 1e3:.1f} s in them",
        "Fewer, larger passes: raise draft_length. Keep fewer top tokens a step. Give it a free core.",
    )


def _batching(facts: dict[str, Any]) -> Finding:
    busy = (_total(facts, "ms") + _total(facts, "host_ms")) / 1e3
    large = facts["passes"].get("large")
    rows = large["rows"] / large["passes"] if large else 0.0
    running = max(1.0, facts["running_s"] / busy) if busy else 0.0
    return Finding(
        "batching_not_effective",
        max(0.0, 1 - rows / running) if large and running else None,
        "running requests that a large pass leaves out",
        0.6,
        f"{rows:.1f} rows a large pass, {running:.1f} requests running",
        "Let large passes gather rows: raise the wait before a large pass, or admit more rows at once.",
    )


def _cache_churn(facts: dict[str, Any]) -> Finding:
    large = facts["passes"].get("large")
    read = large["tokens"] if large else 0
    needed = facts["prompt"] + facts["output"] + facts["drafted"] - facts["accepted"]
    return Finding(
        "cache_churn",
        max(0.0, 1 - needed / read) if read else None,
        "tokens the large model read that prompts, answers and rejected drafts do not account for",
        0.15,
        f"{read} tokens read, {needed} accounted for",
        "Give the KV cache more memory, so that rows keep theirs; keep prompts' common part in front.",
    )


def _queue(facts: dict[str, Any]) -> Finding:
    return Finding(
        "queue",
        _share(facts["queued_s"], facts["total_s"]),
        "request time spent before a slot was free",
        0.2,
        f"{facts['queued_s']:.1f} of {facts['total_s']:.1f} request-seconds",
        "More rows or KV memory if the machine has it; otherwise less load.",
    )


def _waiting(facts: dict[str, Any]) -> Finding:
    own = sum(
        facts[f"{tier}_passes"] * found["ms"] / found["passes"] / 1e3
        for tier, found in facts["passes"].items()
    )
    return Finding(
        "waiting_on_decisions",
        max(0.0, 1 - own / facts["running_s"]) if facts["running_s"] and facts["passes"] else None,
        "running time in which no pass carries the request",
        0.5,
        f"{own:.1f} s in own passes of {facts['running_s']:.1f} running seconds",
        "Rows wait for the other tier: lower the wait before a large pass, or run fewer rows at once.",
    )


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _total(facts: dict[str, Any], name: str) -> float:
    return float(sum(found[name] for found in facts["passes"].values()))

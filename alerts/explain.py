"""What happened to a canary, in words: both arms' numbers, the evidence, and where to look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alerts.evidence import DRIFT_LIMIT, Comparison
from alerts.rollout import Rollout, Verdict
from alerts.rules import CANARY_INCONCLUSIVE, CANARY_PROMOTED, CANARY_ROLLED_BACK, QUALITY_DRIFT, Finding

EVENT_S = 3600.0
"""How long an ended rollout's alert fires before it resolves by itself."""

_WORDS = {
    "agreement": "agreement with the large model",
    "mean_logp_large": "mean log probability under the large model (nats)",
    "acceptance": "draft acceptance",
    "guard_hits": "guard hits per token",
    "errors": "error rate",
    "length": "answer length (tokens)",
    "ttft": "time to first token (s)",
    "tokens_per_s": "tokens per second",
}


@dataclass(frozen=True, slots=True)
class Links:
    """Where annotations point. trace: a URL with `{id}` for the trace id."""

    base_url: str
    trace: str
    advisor: str

    def to_trace(self, request_id: str) -> str:
        """The URL of one trace."""
        return self.trace.replace("{id}", request_id)


def canary_finding(rollout: Rollout, worst: Sequence[str], links: Links, now: float) -> Finding | None:
    """The alert that a rollout's verdict calls for; None while it progresses or long after its end.

    worst: ids of the worst canary traces, worst first.
    """
    last = rollout.history[-1]
    name = rollout.plan.name
    recent = now - last.ts < EVENT_S
    match rollout.verdict:
        case Verdict.ROLLED_BACK if recent:
            alert, severity = CANARY_ROLLED_BACK, "critical"
            summary = f"Canary {name} was rolled back after {last.canary_units} units: {last.reason}."
        case Verdict.PROMOTED if recent:
            alert, severity = CANARY_PROMOTED, "info"
            summary = f"Canary {name} is the stable policy now: {last.reason}."
        case Verdict.INCONCLUSIVE | Verdict.NO_DATA:
            alert, severity = CANARY_INCONCLUSIVE, "warning"
            summary = f"Canary {name} waits for a person ({rollout.verdict}): {last.reason}."
            if rollout.verdict is Verdict.NO_DATA:
                summary = f"Canary {name} gets no data: {last.reason}."
        case _:
            return None
    annotations = {f"trace_{i}": links.to_trace(request_id) for i, request_id in enumerate(worst, start=1)}
    annotations |= {"advisor": links.advisor, "rollout": f"{links.base_url}/v1/rollouts/{name}"}
    return Finding(
        name=alert,
        severity=severity,
        summary=summary,
        description=describe(rollout),
        labels={"rollout": name, "verdict": str(rollout.verdict)},
        annotations=annotations,
    )


def describe(rollout: Rollout) -> str:
    """The numbers of both arms and the evidence, strongest metric first."""
    evidence = rollout.evidence
    lines = [
        f"{evidence.canary_units} canary and {evidence.stable_units} stable units at weight "
        f"{rollout.plan.steps[rollout.step]:g}; evidence against the canary {evidence.against:.3g}, "
        f"limit {evidence.limit:g}; evidence of late drift {evidence.drift:.3g}, limit {DRIFT_LIMIT:g}."
    ]
    ordered = sorted(evidence.comparisons.values(), key=lambda c: -c.metric.weight * c.harm.value)
    lines += [_line(comparison) for comparison in ordered if comparison.units["canary"]]
    return "\n".join(lines)


def _line(comparison: Comparison) -> str:
    name = comparison.metric.name
    canary, stable = comparison.mean_value("canary"), comparison.mean_value("stable")
    missing = comparison.missing["canary"]
    lost = f", {missing} canary values missing and counted as worst" if missing else ""
    return (
        f"{_WORDS.get(name, name)}: canary {_number(canary)}, stable {_number(stable)}; "
        f"against {comparison.harm.value:.3g}, for {comparison.passing.value:.3g}{lost}"
    )


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"


def drift_finding(name: str, evidence: float, links: Links) -> Finding:
    """The alert for stable traffic that is not what it was."""
    words = _WORDS.get(name, name)
    return Finding(
        name=QUALITY_DRIFT,
        severity="warning",
        summary=f"Quality drifts on stable traffic: {words} is worse than at the beginning of this policy.",
        description=f"evidence of drift in {words}: {evidence:.4g}, limit {DRIFT_LIMIT:g}",
        labels={"metric": name},
        annotations={"advisor": links.advisor},
        inhibited_by=(CANARY_ROLLED_BACK,),
    )

"""What is watched, and how each metric becomes a loss in [0, 1]; 0 is good.

Every map is monotone and stated here once: evidence, simulations and annotations read the same table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

CLIP = 0.25
"""Disagreement from which an answer counts as fully lost; small shifts keep their power this way."""

SCORES_WEIGHT = 0.05
"""Share of the combined evidence kept for task scores; the k-th name gets SCORES_WEIGHT / (k (k + 1))."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the comparison.

    weight: its share of the combined evidence. margin: how much worse, in loss units, still counts as
    equal. fast: may roll back before `min_units`, as breakage does not wait. audited: known only where
    the large model has scored the answer. baseline: what lies behind `x / (x + baseline)` maps is the
    stable arm's median over its first observations.
    """

    name: str
    weight: float
    margin: float
    fast: bool = False
    audited: bool = False
    baseline: bool = False


METRICS = (
    Metric("agreement", 0.50, 0.04, audited=True),
    Metric("mean_logp_large", 0.10, 0.05, audited=True),
    Metric("acceptance", 0.05, 0.15),
    Metric("guard_hits", 0.05, 0.05),
    Metric("errors", 0.10, 0.02, fast=True),
    Metric("length", 0.05, 0.10, baseline=True),
    Metric("ttft", 0.05, 0.08, fast=True, baseline=True),
    Metric("tokens_per_s", 0.05, 0.05, baseline=True),
)
"""The metrics of a rollout; agreement's margin is the rollout's own, divided by CLIP."""

BY_NAME = {metric.name: metric for metric in METRICS}


def agreement_loss(agreement: float) -> float:
    """min(1 - a, .25) / .25 of the share of output tokens the large model agrees with."""
    return min(max(1.0 - agreement, 0.0), CLIP) / CLIP


def logp_loss(mean_logp: float) -> float:
    """min(-log p, 2) / 2 of the mean log probability, in nats, that the large model gives the output."""
    return min(max(-mean_logp, 0.0), 2.0) / 2.0


def rate_loss(rate: float, worst: float = 1.0) -> float:
    """min(rate, worst) / worst of a rate where more is worse."""
    return min(max(rate, 0.0), worst) / worst


def slower_loss(seconds: float, baseline: float) -> float:
    """t / (t + baseline): one half at the baseline, 1 for an answer that never comes."""
    return seconds / (seconds + baseline)


def slower_rate_loss(per_s: float, baseline: float) -> float:
    """baseline / (baseline + rate): one half at the baseline, 1 at a standstill."""
    return baseline / (baseline + per_s)


def length_loss(tokens: int, baseline: float) -> float:
    """|log(tokens / baseline)| / log 8, at most 1: runaway and cut-off answers both count."""
    return min(abs(math.log(max(tokens, 1) / baseline)) / math.log(8.0), 1.0)


def to_loss(name: str, value: float | None, baseline: float | None) -> float | None:
    """The loss of one metric's value; None where the value is missing.

    agreement: share in [0, 1]. mean_logp_large: nats. acceptance: share. guard_hits: per output token.
    errors: 0 or 1. length: output tokens. ttft: seconds. tokens_per_s: output tokens a second.
    """
    if value is None:
        return None
    reference = baseline if baseline is not None else 1.0
    match name:
        case "agreement":
            return agreement_loss(value)
        case "mean_logp_large":
            return logp_loss(value)
        case "acceptance":
            return rate_loss(1.0 - value)
        case "guard_hits":
            return rate_loss(value, 0.1)
        case "errors":
            return rate_loss(value)
        case "length":
            return length_loss(int(value), reference)
        case "ttft":
            return slower_loss(max(value, 0.0), reference)
        case "tokens_per_s":
            return slower_rate_loss(max(value, 0.0), reference)
    raise ValueError(f"metric: {name!r} is not watched")

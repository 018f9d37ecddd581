"""Numbers behind the smaller pages: intervals, rates from counters, differences of traces. Pure functions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from replay_ui import view
from replay_ui.steps import Steps

_SAMPLE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})? ([^ ]+)")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


def wilson(hits: int, total: int, z: float = 1.96) -> tuple[float, float] | None:
    """Wilson's 95 % interval of a share; None for nothing (Wilson 1927)."""
    if total <= 0:
        return None
    p = hits / total
    middle = (p + z * z / (2 * total)) / (1 + z * z / total)
    half = z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total)) / (1 + z * z / total)
    return max(0.0, middle - half), min(1.0, middle + half)


def samples(exposition: str) -> Samples:
    """Prometheus text as {metric: {labels: value}}, without the prefix `tokentape:`."""
    found: Samples = {}
    for line in exposition.splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        labels = tuple(sorted(_LABEL.findall(match[2] or "")))
        found.setdefault(match[1].removeprefix("tokentape:"), {})[labels] = value
    return found


def total(found: Samples, name: str, **labels: str) -> float | None:
    """The sum of a metric over the series that have these labels; None where there is no such series."""
    values = [
        value
        for series, value in found.get(name, {}).items()
        if all(dict(series).get(label) == wanted for label, wanted in labels.items())
    ]
    return sum(values) if values else None


def rate(before: float | None, after: float | None, seconds: float) -> float | None:
    """Growth of a counter a second; a counter that fell was restarted, and counts from nothing."""
    if before is None or after is None or seconds <= 0:
        return None
    return (after - before if after >= before else after) / seconds


def throughput(
    summaries: Iterable[Mapping[str, Any]], now: float, window_s: float = 900.0, bucket_s: float = 30.0
) -> list[dict[str, Any]]:
    """Tokens a second by tier and bucket of time, each answer's tokens spread evenly over its decoding.

    Middle tiers count together, and are left out where there are none.
    """
    count = int(window_s / bucket_s)
    start = now - window_s
    summaries = list(summaries)
    middle = any(s.get("middle_tokens") is not None for s in summaries)
    tiers = ("small", "middle", "large", "lookup") if middle else ("small", "large", "lookup")
    sums = {tier: [0.0] * count for tier in tiers}
    for s in summaries:
        first, last = s.get("first_token") or s.get("received"), s.get("finished")
        if first is None or last is None or last < start:
            continue
        counts = {**s, **(s.get("totals") or {})}
        span = max(last - first, 1e-3)
        for i in range(count):
            low = start + i * bucket_s
            overlap = min(last, low + bucket_s) - max(first, low)
            if overlap > 0:
                for tier, buckets in sums.items():
                    buckets[i] += (counts.get(f"{tier}_tokens") or 0) * (overlap / span) / bucket_s
    return [
        {"ts": start + (i + 0.5) * bucket_s, "tier": tier, "tokens": buckets[i]}
        for tier, buckets in sums.items()
        for i in range(count)
    ]


def divergence(a: Steps, b: Steps) -> int | None:
    """The first output position at which two answers differ; None where they are the same."""
    left = [a.column("token_id")[p] for p in a.written]
    right = [b.column("token_id")[p] for p in b.written]
    for i, (x, y) in enumerate(zip(left, right, strict=False)):
        if x != y:
            return i
    return None if len(left) == len(right) else min(len(left), len(right))


def policy_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(setting, left, right) for every setting that differs, and who served."""
    rows = [
        (name.replace("_", " "), str(a.get(name)), str(b.get(name)))
        for name in ("arm", "policy_name", "small_model", "large_model", "numerics", "seed", "gateway")
        if a.get(name) != b.get(name)
    ]
    left, right = a.get("policy"), b.get("policy")
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        rows += [
            (name, _setting(left.get(name)), _setting(right.get(name)))
            for name in dict.fromkeys([*left, *right])
            if left.get(name) != right.get(name)
        ]
    return rows


def _setting(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def count_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(count, left, right) of what the reader compares first."""

    def facts(s: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
        return (
            ("output tokens", str(s.get("completion_tokens"))),
            ("small share", view.share(view.small_share(s))),
            ("draft acceptance", view.number(s.get("draft_acceptance_rate"))),
            ("guard hits", str(s.get("guard_hits"))),
            ("lowest gap", view.number(s.get("min_gap"))),
            ("large passes", str(s.get("large_passes"))),
            ("time taken", view.duration(view.took(s))),
            ("finish", str(s.get("finish_reason"))),
        )

    return [(name, x, y) for (name, x), (_, y) in zip(facts(a), facts(b), strict=True)]


def at_threshold(curve: Sequence[Mapping[str, Any]], threshold: float) -> Mapping[str, Any] | None:
    """The point of an advisor's curve nearest a threshold."""
    return min(curve, key=lambda point: abs(point["threshold"] - threshold), default=None)


def toward(value: float | None, limit: float) -> float:
    """How far evidence has come towards its limit, 0 to 1, on a log scale: evidence multiplies."""
    if value is None or value <= 1 or limit <= 1:
        return 0.0
    return min(math.log(value) / math.log(limit), 1.0)

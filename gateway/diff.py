"""Two traces side by side: their written tokens aligned by position, and where they part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from gateway.core import UNWRITTEN

COLUMNS = (
    "idx", "token_id", "tier", "action", "reason", "outcome", "score", "gap", "p_large", "large_topk_ids",
    "large_topk_logprobs",
)  # fmt: skip
"""The columns of `steps` that a diff reads."""

_SHOWN = ("token_id", "tier", "action", "reason", "outcome", "score", "gap", "p_large")


@dataclass(frozen=True, slots=True)
class Diff:
    """Two choices compared, position by position.

    first_divergence: first output position whose tokens differ (or that only one has), None if none does.
    max_logprob_difference: largest difference between the large model's log-probabilities of a token that
    both traces have among its top tokens, up to the divergence, nats; at logprob_difference_at; None where
    the large model's view of no position is on both. num_same: equal tokens before the divergence.
    steps: per position idx, `a`, `b` (written rows, None past an end), `same` token, `differs`: column names.
    """

    first_divergence: int | None
    num_same: int
    max_logprob_difference: float | None
    logprob_difference_at: int | None
    steps: list[dict[str, Any]]


def diff(a: pa.Table, b: pa.Table) -> Diff:
    """Two choices' steps (COLUMNS, in seq order) aligned by output position."""
    left, right = _written(a), _written(b)
    length = max(len(left), len(right))
    shared = next(
        (i for i, (x, y) in enumerate(zip(left, right, strict=False)) if not _same(x, y)),
        min(len(left), len(right)),
    )
    largest, at = None, None
    # The models read the same prefix at the divergence itself too.
    for i in range(min(shared + 1, len(left), len(right))):
        difference = _logprob_difference(left[i], right[i])
        if difference is not None and (largest is None or difference > largest):
            largest, at = difference, i
    return Diff(
        first_divergence=shared if shared < length else None,
        num_same=shared,
        max_logprob_difference=largest,
        logprob_difference_at=at,
        steps=[_step(i, left, right) for i in range(length)],
    )


def _written(steps: pa.Table) -> list[dict[str, Any]]:
    rows = steps.select(COLUMNS).to_pylist()
    return sorted((row for row in rows if row["outcome"] not in UNWRITTEN), key=lambda row: row["idx"])


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a["token_id"] is not None and a["token_id"] == b["token_id"]


def _step(i: int, left: Sequence[dict[str, Any]], right: Sequence[dict[str, Any]]) -> dict[str, Any]:
    a = left[i] if i < len(left) else None
    b = right[i] if i < len(right) else None
    if a is None or b is None:
        return {"idx": i, "same": False, "differs": [], "a": _shown(a), "b": _shown(b)}
    differs = [name for name in _SHOWN if a[name] != b[name]]
    return {"idx": i, "same": _same(a, b), "differs": differs, "a": _shown(a), "b": _shown(b)}


def _shown(row: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if row is None else {name: row[name] for name in _SHOWN}


def _logprob_difference(a: dict[str, Any], b: dict[str, Any]) -> float | None:
    """Largest difference over the tokens that both rows have the large model's log-probability of."""
    first, second = (
        dict(zip(row["large_topk_ids"] or (), row["large_topk_logprobs"] or (), strict=False))
        for row in (a, b)
    )
    return max((abs(first[token] - second[token]) for token in first.keys() & second.keys()), default=None)

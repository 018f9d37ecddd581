"""Labelled proposals of the tape: what the small model was sure of, and whether the large model agreed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gateway.core import Signals
from gateway.policy import Policy, State, score
from gateway.whatif import NUM_BINS, Labels
from logs.reader import Reader, TraceFilter

MOST_TRACES = 1000
"""Newest traces whose labels are taken: more would cost seconds and sharpen little."""

_INPUTS = ("idx", "run_length", "ema_acceptance", "top1_p", "gap", "entropy", "attn_entropy", "hidden")
_COLUMNS = ("trace_no", "outcome", "propensity", "audit_agrees", "ts", *_INPUTS)


@dataclass(frozen=True, slots=True)
class Labelled:
    """One entry a labelled proposal: its routing score, weight 1/propensity, whether the large model agreed.

    requests: traces they come from. since, until: Unix seconds of the oldest and newest; None without any.
    """

    score: NDArray[np.float64]
    weight: NDArray[np.float64]
    agrees: NDArray[np.bool_]
    requests: int
    since: float | None
    until: float | None

    def binned(self) -> Labels:
        """Pooled into score bins, for `gateway.whatif`."""
        bins = np.minimum(NUM_BINS - 1, (self.score * NUM_BINS).astype(np.int64))
        total = np.bincount(bins, self.weight, NUM_BINS)
        agreed = np.bincount(bins, self.weight * self.agrees, NUM_BINS)
        return Labels(tuple(total.tolist()), tuple(agreed.tolist()))


def labelled(reader: Reader, policy: Policy, filters: TraceFilter | None = None) -> Labelled:
    """The labels of the newest MOST_TRACES traces that the filters let through, scored as the policy would.

    One label a position: where the small model proposed and the large model's own choice is known. Drafts
    that were thrown away unexamined have none; a recovered token repeats its rejected draft and is left out.
    Where a middle tier wrote, it is that tier's token that was labelled: left out too.
    """
    numbers = reader.newest(MOST_TRACES, filters) or [0]
    width = len(policy.router.probe) if policy.router is not None else 0
    span = (numbers[-1], numbers[0])
    found = reader.query(
        f"SELECT {', '.join(_COLUMNS)} FROM {reader.sql('steps', (*_COLUMNS, 'tier'), span)}"
        f" WHERE trace_no BETWEEN {span[0]} AND {span[1]}"
        " AND audit_agrees IS NOT NULL AND top1_p IS NOT NULL AND gap IS NOT NULL AND entropy IS NOT NULL"
        " AND run_length IS NOT NULL AND ema_acceptance IS NOT NULL"
        " AND outcome NOT IN ('recovered', 'discarded', 'forced') AND NOT starts_with(tier, 'middle')"
        " AND trace_no IN (SELECT unnest(?)) AND (? = 0 OR octet_length(hidden) = ?)",
        [numbers, width, 2 * width],
    )
    propensity = found["propensity"].fill_null(1.0).to_numpy()
    ts = found["ts"].to_numpy()
    return Labelled(
        score=scores(policy, found),
        weight=1.0 / np.clip(propensity, 1e-3, 1.0).astype(np.float64),
        agrees=found["audit_agrees"].to_numpy().astype(bool),
        requests=len(np.unique(found["trace_no"].to_numpy())),
        since=float(ts.min()) if len(ts) else None,
        until=float(ts.max()) if len(ts) else None,
    )


def scores(policy: Policy, rows: pa.Table) -> NDArray[np.float64]:
    """gateway.policy.score of every row; the state's other fields do not enter a score."""
    columns = [rows[name].to_pylist() for name in _INPUTS]
    return np.array(
        [
            score(
                policy,
                State(idx, 0, 0, run_length, 0.0, ema_acceptance, 0),
                Signals(top1_p, gap, entropy, attn_entropy, hidden),
            )
            for idx, run_length, ema_acceptance, top1_p, gap, entropy, attn_entropy, hidden in zip(
                *columns, strict=True
            )
        ],
        np.float64,
    )

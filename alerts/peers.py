"""Evidence from the other gateways of a fleet: their closed segments, read as if their answers had been ours.

A segment is folded once, with the state that is saved: after a crash it is folded again onto the state from
before it. What a gateway was still answering when it died is missing there, so worst.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb

from alerts.answers import Row
from alerts.intake import Intake
from gateway.core import (
    MIDDLES,
    Action,
    AuditStatus,
    Counts,
    Finished,
    FinishReason,
    Outcome,
    Reason,
    Sampling,
    Tier,
    Timings,
)
from gateway.policy import Policy
from gateway.request import Request, Served, Trace
from logs.segments import Segment, listed, spanning

_COUNTS = tuple(name for name in Counts.__dataclass_fields__ if name not in ("adapted", "degraded"))
_REQUESTS = (
    "trace_no", "request_id", "choice", "arm", "policy_name", "policy", "params", "parent", "user_hash",
    "received", "admitted", "first_token", "finished", "finish_reason", "audit_status", "incomplete",
    *_COUNTS,
)  # fmt: skip
_STEPS = (
    "trace_no", "request_id", "choice", "seq", "tier", "action", "reason", "score", "threshold", "outcome",
    "p_large", "audit_agrees", "overruled_by",
)  # fmt: skip
_ELSEWHERE = Served("", "", "", "", "", "")


class Peers:
    """Which segments of others have been folded, and the folding. Needs the monitor's lock."""

    def __init__(self, connect: Callable[[], duckdb.DuckDBPyConnection], data_dir: Path) -> None:
        """connect: a fresh cursor of the open tape."""
        self._connect = connect
        self._data_dir = data_dir
        self._folded: set[str] | None = None

    def fold(self, intake: Intake) -> int:
        """Fold every segment of another gateway that was not folded before; how many.

        The first time there is no evidence yet that they could belong to: they are only noted.
        """
        with closing(self._connect()) as query:
            there = {_name(segment): segment for segment in listed(query) if segment.gateway is not None}
            if self._folded is None:
                self._folded = set(there)
            fresh = [name for name in there if name not in self._folded]
            for name in fresh:
                for request, trace, rows in _traces(query, there[name], self._data_dir):
                    intake.fold_elsewhere(request, trace, rows)
            self._folded = set(there)
        return len(fresh)

    def to_list(self) -> list[str] | None:
        """What has been folded, in plain values."""
        return None if self._folded is None else sorted(self._folded)

    def load(self, folded: list[str] | None) -> None:
        """Go on from what `to_list` gave."""
        self._folded = None if folded is None else set(folded)


def _name(segment: Segment) -> str:
    return f"{segment.gateway}/{segment.dt}/{segment.name}"


def _traces(
    query: duckdb.DuckDBPyConnection, segment: Segment, data_dir: Path
) -> Iterator[tuple[Request, Trace, list[Row]]]:
    """The first choices in a segment in order of receipt, each with what its rows say."""
    requests = spanning("requests", _REQUESTS, [segment], data_dir, None)
    steps = spanning("steps", _STEPS, [segment], data_dir, None)
    found = _fetch(query, f"SELECT * FROM {requests} WHERE choice = 0 ORDER BY received, trace_no")
    rows: dict[str, list[Row]] = {row["request_id"]: [] for row in found}
    for step in _fetch(query, f"SELECT * FROM {steps} WHERE choice = 0 ORDER BY trace_no, seq"):
        if step["request_id"] in rows:
            rows[step["request_id"]].append(_row(step))
    for row in found:
        request = _request(row)
        yield request, _trace(request, row), rows[row["request_id"]]


def _request(row: Mapping[str, Any]) -> Request:
    return Request(
        id=row["request_id"],
        choice=row["choice"],
        prompt_ids=(),
        sampling=Sampling(max_tokens=1, seed=0),
        policy=Policy.of(json.loads(row["policy"])),
        policy_name=row["policy_name"],
        received=row["received"],
        arm=row["arm"],
        params=json.loads(row["params"]),
        parent=row["parent"],
        audited=row["audit_status"] != AuditStatus.NOT_CHOSEN,
        user_hash=row["user_hash"],
    )


def _trace(request: Request, row: Mapping[str, Any]) -> Trace:
    """Its end; `finished` is None where the gateway did not live to see it."""
    audit = AuditStatus(row["audit_status"] or AuditStatus.LOST)
    if row["finish_reason"] is None or row["incomplete"]:
        return Trace(request, _ELSEWHERE, None, audit)
    times = Timings(row["received"], row["admitted"], row["first_token"], row["finished"])
    counts: dict[str, Any] = {name: row[name] or 0 for name in _COUNTS}
    end = Finished(FinishReason(row["finish_reason"]), Counts(**counts), times)
    return Trace(request, _ELSEWHERE, end, audit)


def _row(step: Mapping[str, Any]) -> Row:
    return Row(
        seq=step["seq"],
        tier=Tier(step["tier"]),
        action=None if step["action"] is None else Action(step["action"]),
        reason=None if step["reason"] is None else Reason(step["reason"]),
        score=step["score"],
        threshold=step["threshold"],
        outcome=Outcome(step["outcome"]),
        p_large=step["p_large"],
        # By its own verdict, not by token ids: capture = "signals" keeps none of those.
        same=False if step["overruled_by"] in MIDDLES else step["audit_agrees"],
    )


def _fetch(query: duckdb.DuckDBPyConnection, sql: str) -> list[dict[str, Any]]:
    found = query.execute(sql)
    names = [column[0] for column in found.description or ()]
    return [dict(zip(names, row, strict=True)) for row in found.fetchall()]

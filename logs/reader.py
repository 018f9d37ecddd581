"""Reading the tape: pages of traces, one trace, its steps. Named queries only; nothing here writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from logs.schema import REQUESTS, names

PREVIEW_CHARS = 200
REPLAY_TRACES = 256
"""Traces fetched at once while streaming the whole tape."""

_HEAVY = ("prompt_ids", "prompt_text", "answer_text", "params")
_JSON = ("policy", "sampling", "params", "stop")
_LIST_COLUMNS = tuple(c.name for c in REQUESTS if c.name not in _HEAVY)
_STEP_COLUMNS = tuple(name for name in names("steps") if name != "trace_no")


class BadCursor(ValueError):
    """A page cursor that this reader did not hand out."""


@dataclass(frozen=True, slots=True)
class TraceFilter:
    """Which traces to list; None means any. since, until: Unix seconds of `received`, until exclusive.

    q: text found in prompt, answer or id, whatever the case. min_guard_hits, max_acceptance: a choice
    with at least so many guard hits, with at most that draft acceptance rate.
    """

    arm: str | None = None
    finish_reason: str | None = None
    since: float | None = None
    until: float | None = None
    q: str | None = None
    min_guard_hits: int | None = None
    max_acceptance: float | None = None

    def where(self) -> tuple[str, list[Any]]:
        """As SQL over requests, with its parameters."""
        text = (
            "(contains(lower(prompt_text), ?) OR contains(lower(answer_text), ?)"
            " OR starts_with(lower(request_id), ?))"
        )
        clauses: list[tuple[str, list[Any] | None]] = [
            ("arm = ?", _given(self.arm)),
            ("finish_reason = ?", _given(self.finish_reason)),
            ("received >= ?", _given(self.since)),
            ("received < ?", _given(self.until)),
            (text, [self.q.lower()] * 3 if self.q else None),
            ("guard_hits >= ?", _given(self.min_guard_hits)),
            ("draft_acceptance_rate <= ?", _given(self.max_acceptance)),
        ]
        used = [(clause, values) for clause, values in clauses if values is not None]
        sql = " AND ".join(clause for clause, _ in used) or "true"
        return sql, [value for _, values in used for value in values]


class Reader:
    """Reads the tape behind an open DuckDB connection; safe to call from any thread.

    sync is called before each query, so that what the writer was handed is seen.
    """

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        data_dir: Path,
        sync: Callable[[], object] | None = None,
    ) -> None:
        self._connection = connection
        self._data_dir = data_dir
        self._sync = sync

    @classmethod
    def open(cls, data_dir: Path) -> Reader:
        """A reader of a tape that no gateway holds; raises duckdb.IOException where one does."""
        path = data_dir / "tape.duckdb"
        return cls(duckdb.connect(str(path), read_only=True), data_dir)

    def close(self) -> None:
        """Close a connection that `open` made."""
        self._connection.close()

    def traces(
        self, limit: int = 50, cursor: str | None = None, filters: TraceFilter | None = None
    ) -> tuple[list[dict[str, Any]], str | None]:
        """A page of summaries, newest first, and the cursor of the next page or None.

        Raises BadCursor. A summary is as `trace` gives it, without prompt, answer and parameters.
        """
        where, values = (filters or TraceFilter()).where()
        query = self._cursor()
        found = query.execute(
            f"SELECT trace_no FROM requests WHERE {where} AND trace_no < ?"
            " GROUP BY trace_no ORDER BY trace_no DESC LIMIT ?",
            [*values, _before(cursor), limit + 1],
        ).fetchall()
        numbers = [number for (number,) in found[:limit]]
        rows = _rows(
            query,
            f"SELECT {', '.join(_LIST_COLUMNS)}, left(answer_text, {PREVIEW_CHARS}) AS answer_preview"
            " FROM requests WHERE trace_no IN (SELECT unnest(?)) ORDER BY trace_no DESC, choice",
            [numbers],
        )
        page = [_summary(choices) for choices in _by_trace(rows)]
        return page, str(numbers[-1]) if len(found) > limit else None

    def trace(self, request_id: str) -> dict[str, Any] | None:
        """One trace's summary: its first choice's columns, totals over choices, every choice; or None."""
        rows = self.choices(request_id)
        return _summary(rows) if rows else None

    def choices(self, request_id: str) -> list[dict[str, Any]]:
        """The requests rows of a trace, by choice; JSON columns parsed."""
        return _rows(
            self._cursor(),
            f"SELECT *, left(answer_text, {PREVIEW_CHARS}) AS answer_preview FROM requests"
            " WHERE request_id = ? ORDER BY choice",
            [request_id],
        )

    def has(self, request_id: str) -> bool:
        """Whether a trace of that id was recorded."""
        found = self._cursor().execute("SELECT 1 FROM requests WHERE request_id = ? LIMIT 1", [request_id])
        return found.fetchone() is not None

    def steps(
        self,
        request_id: str,
        choice: int = 0,
        start: int | None = None,
        stop: int | None = None,
        columns: Sequence[str] = _STEP_COLUMNS,
    ) -> pa.Table:
        """The rows of a choice in seq order, output positions start <= idx < stop; empty if unknown."""
        query = self._cursor()
        numbers = query.execute(
            "SELECT trace_no FROM requests WHERE request_id = ? AND choice = ?", [request_id, choice]
        ).fetchall()
        bounds = [0 if start is None else start, 2**31 - 1 if stop is None else stop]
        return _table(
            query,
            f"SELECT {', '.join(columns)} FROM steps WHERE trace_no = ? AND request_id = ? AND choice = ?"
            " AND idx >= ? AND idx < ? ORDER BY seq",
            [numbers[0][0] if numbers else -1, request_id, choice, *bounds],
        )

    def every_choice(self, columns: Sequence[str]) -> Iterator[tuple[dict[str, Any], pa.Table]]:
        """Every choice on the tape, oldest first, as its requests row and those columns of its steps."""
        last = 0
        while True:
            query = self._cursor()
            found = query.execute(
                "SELECT DISTINCT trace_no FROM requests WHERE trace_no > ? ORDER BY trace_no LIMIT ?",
                [last, REPLAY_TRACES],
            ).fetchall()
            if not found:
                return
            span = [found[0][0], found[-1][0]]
            last = span[1]
            rows = _rows(
                query,
                f"SELECT {', '.join(_LIST_COLUMNS)} FROM requests WHERE trace_no BETWEEN ? AND ?"
                " ORDER BY trace_no, choice",
                span,
            )
            table = _table(
                query,
                f"SELECT trace_no AS _no, choice AS _choice, {', '.join(columns)} FROM steps"
                " WHERE trace_no BETWEEN ? AND ? ORDER BY trace_no, choice, seq",
                span,
            )
            yield from _split(rows, table)

    def _cursor(self) -> duckdb.DuckDBPyConnection:
        if self._sync is not None:
            self._sync()
        return self._connection.cursor()


def _given(value: Any) -> list[Any] | None:
    return None if value is None else [value]


def _before(cursor: str | None) -> int:
    if cursor is None:
        return 2**63 - 1
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise BadCursor(f"cursor {cursor[:40]!r} is not one that a page of traces returned")
    return int(cursor)


def _rows(query: duckdb.DuckDBPyConnection, sql: str, values: Sequence[object]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = _table(query, sql, values).to_pylist()
    for row in rows:
        for name in _JSON:
            if row.get(name) is not None:
                row[name] = json.loads(row[name])
    return rows


def _table(query: duckdb.DuckDBPyConnection, sql: str, values: Sequence[object]) -> pa.Table:
    relation = query.sql(sql, params=list(values))
    assert relation is not None
    return relation.to_arrow_table()


def _by_trace(rows: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    traces: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        traces.setdefault(row["request_id"], []).append(row)
    return list(traces.values())


_TOTALS = (
    "completion_tokens",
    "small_tokens",
    "large_tokens",
    "lookup_tokens",
    "protected_tokens",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "guard_hits",
    "large_passes",
    "small_passes",
    "audited_tokens",
    "audit_agreements",
)


_OF_THE_REQUEST = (
    "trace_no", "request_id", "endpoint", "model", "arm", "policy_name", "policy_hash", "policy", "params",
    "num_topk", "parent", "forked_at", "small_model", "large_model", "small_hash", "large_hash",
    "router_hash", "numerics", "version", "capture",
)  # fmt: skip
_PROMPT = ("prompt_ids", "prompt_text", "prompt_preview")


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Choice 0's columns, `totals` over all choices, and `choices`: what each has of its own."""
    first = rows[0]
    choices = [
        {
            name: value
            for name, value in row.items()
            if name not in _OF_THE_REQUEST and not (name in _PROMPT and value == first[name])
        }
        for row in rows
    ]
    totals = {name: sum(row[name] or 0 for row in rows) for name in _TOTALS}
    return {**first, "num_choices": len(rows), "totals": totals, "choices": choices}


def _split(rows: list[dict[str, Any]], table: pa.Table) -> Iterator[tuple[dict[str, Any], pa.Table]]:
    """Each row with its slice of a table sorted by (_no, _choice)."""
    numbers, choices = table["_no"].to_numpy(), table["_choice"].to_numpy()
    table = table.drop_columns(["_no", "_choice"]).combine_chunks()
    changes = np.flatnonzero((np.diff(numbers) != 0) | (np.diff(choices) != 0)) + 1
    starts = [0, *changes.tolist()] if len(numbers) else []
    ends = [*changes.tolist(), len(numbers)]
    slices = {
        (int(numbers[start]), int(choices[start])): (start, end - start)
        for start, end in zip(starts, ends, strict=False)
    }
    for row in rows:
        yield row, table.slice(*slices.get((row["trace_no"], row["choice"]), (0, 0)))

"""Reading the tape: pages of traces, one trace, its steps. Named queries only; nothing here writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from logs.results import fetch_rows, fetch_table, split
from logs.schema import REQUESTS, VERSION, names, version_of
from logs.segments import FLEET, FOLDER, Segment, as_of, found, listed, spanning
from logs.summary import by_trace, summary
from logs.tape import FILE

PREVIEW_CHARS = 200
REPLAY_TRACES = 256
"""Traces fetched at once while streaming the whole tape."""
FIRST_SEGMENTS = 4
"""Segments looked into at first for a page that the live rows do not fill."""

_HEAVY = ("prompt_ids", "prompt_text", "answer_text", "params")
_ALL_COLUMNS = names("requests")
_LIST_COLUMNS = tuple(c.name for c in REQUESTS if c.name not in _HEAVY)
STEP_COLUMNS = tuple(name for name in names("steps") if name != "trace_no")
_LATEST = 2**63 - 1


class BadCursor(ValueError):
    """A page cursor that this reader did not hand out."""


@dataclass(frozen=True, slots=True)
class TraceFilter:
    """Which traces to list; None means any. since, until: Unix seconds of `received`, until exclusive.

    gateway: who served it, in a fleet. q: text found in prompt, answer or id, whatever the case.
    min_guard_hits, max_acceptance: a choice with at least so many guard hits, with at most that draft
    acceptance rate.
    """

    arm: str | None = None
    finish_reason: str | None = None
    since: float | None = None
    until: float | None = None
    q: str | None = None
    min_guard_hits: int | None = None
    max_acceptance: float | None = None
    gateway: str | None = None

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
            ("gateway = ?", _given(self.gateway)),
        ]
        used = [(clause, values) for clause, values in clauses if values is not None]
        sql = " AND ".join(clause for clause, _ in used) or "true"
        return sql, [value for _, values in used for value in values]


@dataclass(frozen=True, slots=True)
class _Place:
    """The trace numbers behind an id (one, unless choices were admitted far apart) and what holds them."""

    numbers: list[int]
    segments: list[Segment]
    live: bool


class Reader:
    """Reads the tape, live tables and segments as one; for any thread.

    cursor gives a DuckDB connection for one call. sync is called before each query, so that what the writer
    was handed is seen. live_version: schema version of the live tables, None where there are none.
    """

    def __init__(
        self,
        cursor: Callable[[], duckdb.DuckDBPyConnection],
        data_dir: Path,
        sync: Callable[[], object] | None = None,
        live_version: int | None = VERSION,
        close: Callable[[], None] | None = None,
    ) -> None:
        self._new_cursor = cursor
        self._close = close
        self.data_dir = data_dir
        self._sync = sync
        self._live_version = live_version

    @classmethod
    def open(cls, data_dir: Path) -> Reader:
        """A reader of a tape that no gateway holds, or of its segments where there is no live file.

        Never writes: a read-only directory will do. Raises duckdb.IOException where a gateway has it.
        """
        path = data_dir / FILE
        if not path.exists() and ((data_dir / FOLDER).is_dir() or (data_dir / FLEET).is_dir()):
            connection, version = duckdb.connect(), None
        else:
            connection = duckdb.connect(str(path), read_only=True)
            version = version_of(connection)
        return cls(connection.cursor, data_dir, live_version=version, close=connection.close)

    def close(self) -> None:
        """Close a connection that `open` made."""
        if self._close is not None:
            self._close()

    def traces(
        self, limit: int = 50, cursor: str | None = None, filters: TraceFilter | None = None
    ) -> tuple[list[dict[str, Any]], str | None]:
        """A page of summaries, newest first, and the cursor of the next page or None.

        Raises BadCursor. A summary is as `trace` gives it, without prompt, answer and parameters.
        """
        query = self._cursor()
        segments = self._segments(query)
        numbers = self._page(query, segments, limit + 1, _before(cursor), filters or TraceFilter())
        page = numbers[:limit]
        rows = self._requests(query, _LIST_COLUMNS, page, segments)
        return [summary(choices) for choices in by_trace(rows)], str(page[-1]) if numbers[limit:] else None

    def trace(self, request_id: str) -> dict[str, Any] | None:
        """One trace's summary: its first choice's columns, totals over choices, every choice, its reviews
        and scores; or None.
        """
        rows = self.choices(request_id)
        if not rows:
            return None
        return summary(rows) | {name: self._said(name, request_id) for name in ("reviews", "scores")}

    def choices(self, request_id: str) -> list[dict[str, Any]]:
        """The requests rows of a trace, by choice; JSON columns parsed."""
        query = self._cursor()
        place = self._place(query, request_id)
        rows = self._requests(query, _ALL_COLUMNS, place.numbers, place.segments, place.live)
        return [row for row in rows if row["request_id"] == request_id]

    def _said(self, table: str, request_id: str) -> list[dict[str, Any]]:
        """The reviews or scores of a trace, oldest first; those columns that are not its id."""
        if self._live_version is None:
            return []
        columns = ", ".join(name for name in names(table) if name != "request_id")
        found = fetch_table(
            self._new_cursor(),
            f"SELECT {columns} FROM {table} WHERE request_id = ? ORDER BY ts",
            [request_id],
        )
        rows: list[dict[str, Any]] = found.to_pylist()
        return rows

    def has(self, request_id: str) -> bool:
        """Whether a trace of that id is on the tape."""
        return bool(self._place(self._cursor(), request_id).numbers)

    def steps(
        self,
        request_id: str,
        choice: int = 0,
        start: int | None = None,
        stop: int | None = None,
        columns: Sequence[str] = STEP_COLUMNS,
    ) -> pa.Table:
        """The rows of a choice in seq order, output positions start <= idx < stop; empty if unknown."""
        query = self._cursor()
        place = self._place(query, request_id)
        needed = _with(columns, "trace_no", "request_id", "choice", "idx", "seq")
        source = self._from("steps", needed, place.segments, live=place.live)
        numbers = ", ".join(map(str, place.numbers)) or "NULL"
        low, high = 0 if start is None else int(start), 2**31 - 1 if stop is None else int(stop)
        return fetch_table(
            query,
            f"SELECT {', '.join(columns)} FROM {source} WHERE trace_no IN ({numbers})"
            f" AND request_id = ? AND choice = ? AND idx >= {low} AND idx < {high} ORDER BY seq",
            [request_id, choice],
        )

    def every_choice(
        self, columns: Sequence[str], filters: TraceFilter | None = None
    ) -> Iterator[tuple[dict[str, Any], pa.Table]]:
        """Every choice the filters let through, oldest first: its requests row and columns of its steps."""
        where, values = (filters or TraceFilter()).where()
        query = self._cursor()
        ends = sorted({segment.last_no for segment in self._segments(query)})
        last = 0
        for end in (*ends, _LATEST):
            while last < end:
                query = self._cursor()
                segments = self._holding(query, last + 1, end)
                source = self._from("requests", (*_LIST_COLUMNS, *FILTERED), segments)
                rows = fetch_rows(
                    query,
                    f"SELECT {', '.join(_LIST_COLUMNS)} FROM {source} WHERE trace_no IN"
                    f" (SELECT DISTINCT trace_no FROM {source} WHERE {where} AND trace_no > {last}"
                    f" AND trace_no <= {end} ORDER BY trace_no LIMIT {REPLAY_TRACES})"
                    " ORDER BY trace_no, choice",
                    values,
                )
                if not rows:
                    break
                first, last = rows[0]["trace_no"], rows[-1]["trace_no"]
                steps = self._from("steps", _with(columns, "trace_no", "choice", "seq"), segments)
                table = fetch_table(
                    query,
                    f"SELECT trace_no AS _no, choice AS _choice, {', '.join(columns)} FROM {steps}"
                    f" WHERE trace_no BETWEEN {first} AND {last} ORDER BY trace_no, choice, seq",
                    [],
                )
                yield from split(rows, table)
            last = max(last, end)

    def sql(self, table: str, columns: Sequence[str], span: tuple[int, int] = (0, _LATEST)) -> str:
        """A relation over a table, live and segments, for queries of one's own with `query`.

        span: trace numbers beyond which rows may be left out (they need not be).
        """
        return self._from(table, columns, self._holding(self._cursor(), *span))

    def newest(self, most: int, filters: TraceFilter | None = None) -> list[int]:
        """The numbers of the newest traces that the filters let through, newest first."""
        query = self._cursor()
        return self._page(query, self._segments(query), most, _LATEST, filters or TraceFilter())

    def query(self, text: str, values: Sequence[object] = ()) -> pa.Table:
        """The result of a query of one's own."""
        return fetch_table(self._cursor(), text, values)

    def segments(self) -> list[Segment]:
        """The closed parts of the tape, by first trace number."""
        return self._segments(self._cursor())

    def _page(
        self,
        query: duckdb.DuckDBPyConnection,
        segments: list[Segment],
        size: int,
        before: int,
        filters: TraceFilter,
    ) -> list[int]:
        """The newest trace numbers below `before`, at most size, newest first."""
        where, values = filters.where()
        left = sorted(segments, key=lambda segment: -segment.last_no)
        left = [segment for segment in left if segment.first_no < before]
        numbers: list[int] = []
        # Live rows first. A full page is final once every segment not yet looked into is older than it.
        live, group = True, 0
        while live or (left and not (len(numbers) == size and left[0].last_no < numbers[-1])):
            source = self._from("requests", FILTERED, left[:group], live=live)
            rows = query.execute(
                f"SELECT DISTINCT trace_no FROM {source} WHERE {where} AND trace_no < {before}"
                f" ORDER BY trace_no DESC LIMIT {size}",
                values,
            ).fetchall()
            numbers = sorted({*numbers, *(number for (number,) in rows)}, reverse=True)[:size]
            left, live, group = left[group:], False, max(FIRST_SEGMENTS, group * 2)
        return numbers

    def _requests(
        self,
        query: duckdb.DuckDBPyConnection,
        columns: Sequence[str],
        numbers: Sequence[int],
        segments: list[Segment],
        live: bool = True,
    ) -> list[dict[str, Any]]:
        """The requests rows of those traces, newest first, by choice."""
        if not numbers:
            return []
        holding = [s for s in segments if any(s.first_no <= n <= s.last_no for n in numbers)]
        source = self._from("requests", _with(columns, "answer_text"), holding, live)
        return fetch_rows(
            query,
            f"SELECT {', '.join(columns)}, left(answer_text, {PREVIEW_CHARS}) AS answer_preview FROM {source}"
            f" WHERE trace_no BETWEEN {min(numbers)} AND {max(numbers)}"
            f" AND trace_no IN ({', '.join(map(str, numbers))}) ORDER BY trace_no DESC, choice",
            [],
        )

    def _place(self, query: duckdb.DuckDBPyConnection, request_id: str) -> _Place:
        """Where the rows of a trace are."""
        if self._live_version is None:
            segments = self._segments(query)
            source = self._from("requests", ("request_id", "trace_no"), segments)
            rows = query.execute(f"SELECT DISTINCT trace_no FROM {source} WHERE request_id = ?", [request_id])
            numbers = [number for (number,) in rows.fetchall()]
            holding = [s for s in segments if any(s.first_no <= n <= s.last_no for n in numbers)]
            return _Place(numbers, holding, live=False)
        elsewhere = as_of("moved", ("request_id", "trace_no", "name", "dt", "gateway"), self._live_version)
        places = query.execute(
            "SELECT DISTINCT trace_no, NULL, NULL, NULL FROM requests WHERE request_id = ?"
            f" UNION ALL SELECT trace_no, name, dt, gateway FROM {elsewhere} WHERE request_id = ?",
            [request_id, request_id],
        ).fetchall()
        moved = {(name, dt, gateway) for _, name, dt, gateway in places if name is not None}
        segments = self._segments(query) if moved else []
        holding = [s for s in segments if (s.name, s.dt, s.gateway) in moved]
        live = any(name is None for _, name, _, _ in places)
        return _Place([number for number, *_ in places], holding, live)

    def _from(
        self, table: str, columns: Sequence[str], segments: Iterable[Segment], live: bool = True
    ) -> str:
        version = self._live_version if live else None
        return spanning(table, tuple(dict.fromkeys(columns)), segments, self.data_dir, version)

    def _segments(self, query: duckdb.DuckDBPyConnection) -> list[Segment]:
        if self._live_version is None:
            return found(self.data_dir)
        return listed(query, self._live_version)

    def _holding(self, query: duckdb.DuckDBPyConnection, first: int, last: int) -> list[Segment]:
        """The segments that may hold trace numbers first..last."""
        return [s for s in self._segments(query) if s.first_no <= last and first <= s.last_no]

    def _cursor(self) -> duckdb.DuckDBPyConnection:
        if self._sync is not None:
            self._sync()
        return self._new_cursor()


FILTERED = (
    "trace_no", "request_id", "arm", "finish_reason", "received", "prompt_text", "answer_text", "guard_hits",
    "draft_acceptance_rate", "gateway",
)  # fmt: skip
"""The columns that TraceFilter reads."""


def _given(value: Any) -> list[Any] | None:
    return None if value is None else [value]


def _with(columns: Sequence[str], *needed: str) -> tuple[str, ...]:
    return (*columns, *needed)


def _before(cursor: str | None) -> int:
    if cursor is None:
        return _LATEST
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) <= 19 and int(cursor) <= _LATEST):
        raise BadCursor(f"cursor {cursor[:40]!r} is not one that a page of traces returned")
    return int(cursor)

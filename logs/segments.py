"""Closed parts of the tape as Parquet: what moves there, how it moves without loss, what is dropped again.

segments/<table>/dt=<UTC day>/v<schema>-<first trace_no>-<last trace_no>.parquet, three files a segment. They
are written under a temporary name and renamed, requests last: a segment is complete once that file is there.
The rows leave the live tables in the transaction that enters the segment into `segments`. What other gateways
of a fleet have closed lies beside it, under fleet/<gateway>/, in the same way.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

import duckdb
import structlog

from logs.schema import TABLES, VERSION, names

FOLDER = "segments"
FLEET = "fleet"
"""fleet/<gateway>/segments/...: copies of what other gateways have closed."""
MOVED_TABLES = ("steps", "passes", "requests")
MAX_STEPS = 500_000
"""Steps of one segment: bounds how long the writer waits while its rows leave the live table."""
GROUP_ROWS = 16_384
"""Rows of a Parquet row group: what opening one trace decodes."""
SETTLE_S = 60.0
"""A trace moves when it has been finished for so long."""
UNSETTLED_S = 3600.0
"""A trace whose steps never settled (an audit that was lost) moves when it has been finished for so long."""

_NAME = re.compile(r"v(\d+)-(\d+)-(\d+)\.parquet")

log = structlog.get_logger("logs.segments")


@dataclass(frozen=True, slots=True)
class Segment:
    """One closed part of the tape; bytes on disk, Unix seconds. gateway: who made it; None: this one."""

    name: str
    dt: str
    first_no: int
    last_no: int
    num_requests: int
    num_steps: int
    num_passes: int
    bytes: int
    first_ts: float
    last_ts: float
    gateway: str | None = None

    @property
    def version(self) -> int:
        """Schema version that wrote it."""
        return _parse(self.name)[0]

    def path(self, data_dir: Path, table: str) -> Path:
        """Its file for one table."""
        return root_of(data_dir, self.gateway) / FOLDER / table / f"dt={self.dt}" / self.name


def root_of(data_dir: Path, gateway: str | None) -> Path:
    """Where a gateway's segments lie; None: this one's."""
    return data_dir if gateway is None else data_dir / FLEET / gateway


def own(query: duckdb.DuckDBPyConnection) -> list[Segment]:
    """The segments that this gateway made, by their first trace number."""
    return [segment for segment in listed(query) if segment.gateway is None]


def listed(query: duckdb.DuckDBPyConnection, version: int = VERSION) -> list[Segment]:
    """The segments of an open tape of that version, other gateways' among them, by first trace number."""
    source = as_of("segments", names("segments"), version)
    rows = query.execute(f"SELECT * FROM {source} ORDER BY first_no").fetchall()
    return [Segment(*row) for row in rows]


def found(data_dir: Path) -> list[Segment]:
    """The complete segments in the folder, without a tape to list them; raises duckdb.Error on damage."""
    gateways = [None, *sorted(path.name for path in (data_dir / FLEET).glob("*") if path.is_dir())]
    return [
        describe(path, data_dir, gateway)
        for gateway in gateways
        for path in complete(root_of(data_dir, gateway))
    ]


def describe(requests_file: Path, data_dir: Path, gateway: str | None = None) -> Segment:
    """What a segment's files say of themselves; raises duckdb.Error where one of them is damaged."""
    blank = named(requests_file, gateway)
    files = {table: blank.path(data_dir, table) for table in MOVED_TABLES}
    with duckdb.connect() as memory:
        counts = {}
        for table, path in files.items():
            row = memory.execute("SELECT count(*) FROM read_parquet(?)", [str(path)]).fetchone()
            counts[table] = row[0] if row else 0
        times = memory.execute(
            "SELECT min(coalesce(finished, received)), max(coalesce(finished, received))"
            " FROM read_parquet(?)",
            [str(requests_file)],
        ).fetchone()
    assert times is not None
    size = sum(path.stat().st_size for path in files.values())
    return replace(
        blank,
        num_requests=counts["requests"],
        num_steps=counts["steps"],
        num_passes=counts["passes"],
        bytes=size,
        first_ts=times[0],
        last_ts=times[1],
    )


def named(requests_file: PurePath, gateway: str | None = None) -> Segment:
    """What a segment's name says; the rest is zero. ValueError for a file that is none."""
    _, first_no, last_no = _parse(requests_file.name)
    dt = requests_file.parent.name.removeprefix("dt=")
    return Segment(requests_file.name, dt, first_no, last_no, 0, 0, 0, 0, 0.0, 0.0, gateway)


def live_bytes(query: duckdb.DuckDBPyConnection) -> int:
    """Size of the live tables, bytes in use (free blocks of the file not counted)."""
    row = query.execute("SELECT used_blocks * block_size FROM pragma_database_size()").fetchone()
    return int(row[0]) if row else 0


def compact(
    query: duckdb.DuckDBPyConnection,
    data_dir: Path,
    writing: AbstractContextManager[object],
    *,
    now: float | None = None,
    everything: bool = False,
    settle_s: float = SETTLE_S,
) -> list[Segment]:
    """Move finished traces of closed hours (everything: of the running hour too, once over for settle_s) to
    Parquet.

    writing is held while rows leave the live tables, so that the writer does not meet them half gone.
    """
    now = time.time() if now is None else now
    cutoff = now - settle_s if everything else now // 3600 * 3600
    made: list[Segment] = []
    for day, numbers in _movable(query, cutoff, now):
        made.append(_move(query, data_dir, writing, day, numbers, cutoff))
        log.info("tape_segment", name=made[-1].name, day=day, steps=made[-1].num_steps, bytes=made[-1].bytes)
    return made


def expire(
    query: duckdb.DuckDBPyConnection,
    data_dir: Path,
    *,
    now: float,
    max_age_s: float | None = None,
    max_bytes: int | None = None,
) -> list[Segment]:
    """Drop segments whose last trace is older than max_age_s, then the oldest while they exceed max_bytes."""
    segments = sorted(own(query), key=lambda segment: segment.last_ts)
    total = sum(segment.bytes for segment in segments)
    dropped: list[Segment] = []
    for segment in segments:
        too_old = max_age_s is not None and segment.last_ts < now - max_age_s
        too_much = max_bytes is not None and total > max_bytes
        if not (too_old or too_much):
            continue
        discard(query, data_dir, segment)
        total -= segment.bytes
        dropped.append(segment)
        log.info(
            "tape_segment_dropped", name=segment.name, day=segment.dt, reason="age" if too_old else "size"
        )
    return dropped


def spanning(
    table: str, columns: Sequence[str], segments: Iterable[Segment], data_dir: Path, live_version: int | None
) -> str:
    """SQL of the table's rows in the live table (None: there is none) and those segments, as one relation.

    Columns that a version did not have yet are null.
    """
    parts = [as_of(table, columns, live_version)] if live_version is not None else []
    by_version: dict[int, list[str]] = {}
    for segment in segments:
        by_version.setdefault(segment.version, []).append(str(segment.path(data_dir, table)))
    for version, files in by_version.items():
        quoted = ", ".join("'" + file.replace("'", "''") + "'" for file in files)
        parts.append(as_of(table, columns, version, f"read_parquet([{quoted}], hive_partitioning = false)"))
    if not parts:
        known = {column.name: column for column in TABLES[table]}
        nothing = ", ".join(f"NULL::{known[name].sql} AS {name}" for name in columns)
        return f"(SELECT {nothing} WHERE false)"
    return f"({' UNION ALL '.join(parts)})"


def as_of(table: str, columns: Sequence[str], version: int, source: str | None = None) -> str:
    """SQL of columns of a table (or another source of its rows) as that version wrote it, as one relation."""
    known = {column.name: column for column in TABLES[table]}
    chosen = (
        name if known[name].since <= version else f"NULL::{known[name].sql} AS {name}" for name in columns
    )
    return f"(SELECT {', '.join(chosen)} FROM {source or table})"


def _movable(
    query: duckdb.DuckDBPyConnection, cutoff: float, now: float
) -> Iterable[tuple[str, tuple[int, int, list[int]]]]:
    """(UTC day, (first, last, trace numbers)) of what may move, at most MAX_STEPS steps each."""
    rows = query.execute(
        """
        SELECT trace_no, strftime(make_timestamp((ended * 1e6)::BIGINT), '%Y-%m-%d') AS day, num_steps
        FROM (
            SELECT trace_no, max(coalesce(finished, received)) AS ended,
                   sum(coalesce(completion_tokens, 0) + coalesce(num_draft_tokens, 0)) AS num_steps,
                   bool_and(finish_reason IS NOT NULL OR interrupted) AS over,
                   bool_and(audit_status IS NOT NULL OR interrupted) AS settled
            FROM requests GROUP BY trace_no
        )
        WHERE over AND (settled OR ended < $now - $late) AND (ended < $cutoff OR ended > $now + 3600)
        ORDER BY day, trace_no
        """,
        {"cutoff": cutoff, "now": now, "late": UNSETTLED_S},
    ).fetchall()
    chunk: list[int] = []
    steps = 0
    for i, (number, day, num_steps) in enumerate(rows):
        chunk.append(number)
        steps += num_steps
        last = i + 1 == len(rows) or rows[i + 1][1] != day
        if last or steps >= MAX_STEPS:
            yield day, (min(chunk), max(chunk), chunk)
            chunk, steps = [], 0


def _move(
    query: duckdb.DuckDBPyConnection,
    data_dir: Path,
    writing: AbstractContextManager[object],
    day: str,
    chunk: tuple[int, int, list[int]],
    cutoff: float,
) -> Segment:
    first, last, numbers = chunk
    query.execute("CREATE OR REPLACE TEMP TABLE moving AS SELECT unnest(?) AS trace_no", [numbers])
    within = f"trace_no BETWEEN {first} AND {last} AND trace_no IN (FROM moving)"
    # Passes belong to no trace; those up to the cutoff go with the first segment of the run.
    rows = {"steps": within, "passes": f"ts < {cutoff!r}", "requests": within}
    order = {"steps": "trace_no, choice, seq", "passes": "ts, pass_id", "requests": "trace_no, choice"}
    name = f"v{VERSION}-{first:012d}-{last:012d}.parquet"
    for table in MOVED_TABLES:
        path = data_dir / FOLDER / table / f"dt={day}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(name + ".tmp")
        quoted = str(unfinished).replace("'", "''")
        selected = (
            f"SELECT {', '.join(names(table))} FROM {table} WHERE {rows[table]} ORDER BY {order[table]}"
        )
        options = f"FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {GROUP_ROWS}"
        query.execute(f"COPY ({selected}) TO '{quoted}' ({options})")
        with unfinished.open("rb") as written:
            os.fsync(written.fileno())
        unfinished.rename(path)
    segment = describe(data_dir / FOLDER / "requests" / f"dt={day}" / name, data_dir)
    with writing:
        query.begin()
        try:
            for table in MOVED_TABLES:
                query.execute(f"DELETE FROM {table} WHERE {rows[table]}")
            enter(query, data_dir, segment)
            query.commit()
        except BaseException:
            query.rollback()
            raise
    return segment


def enter(query: duckdb.DuckDBPyConnection, data_dir: Path, segment: Segment) -> None:
    """Put a segment on the tape's list, within the caller's transaction."""
    marks = ", ".join("?" for _ in names("segments"))
    values = [getattr(segment, name) for name in names("segments")]
    query.execute(f"INSERT INTO segments ({', '.join(names('segments'))}) VALUES ({marks})", values)
    query.execute(
        "INSERT INTO moved SELECT DISTINCT request_id, trace_no, ?, ?, ? FROM read_parquet(?)",
        [segment.name, segment.dt, segment.gateway, str(segment.path(data_dir, "requests"))],
    )


def forget(query: duckdb.DuckDBPyConnection, segment: Segment) -> None:
    """Take a segment off the tape's list."""
    query.begin()
    for table in ("segments", "moved"):
        query.execute(
            f"DELETE FROM {table} WHERE name = ? AND dt = ? AND gateway IS NOT DISTINCT FROM ?",
            [segment.name, segment.dt, segment.gateway],
        )
    query.commit()


def discard(query: duckdb.DuckDBPyConnection, data_dir: Path, segment: Segment) -> None:
    """Take a segment off the list and its files off the disk."""
    forget(query, segment)
    # Requests first: without that file the others are no segment, should the process die here.
    for table in reversed(MOVED_TABLES):
        segment.path(data_dir, table).unlink(missing_ok=True)


def complete(data_dir: Path) -> list[Path]:
    """The requests files of the complete segments in the folder."""
    paths = (data_dir / FOLDER / "requests").glob("dt=*/*.parquet")
    return sorted(path for path in paths if _NAME.fullmatch(path.name))


def _parse(name: str) -> tuple[int, int, int]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not the name of a segment")
    version, first, last = match.groups()
    return int(version), int(first), int(last)

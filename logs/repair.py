"""Segments and tape brought together again: after a crash, after damage, with a tape that was set aside."""

from __future__ import annotations

from pathlib import Path

import duckdb
import structlog

from logs.segments import FOLDER, MOVED_TABLES, Segment, complete, describe, enter, forget, listed, named, own
from logs.tape import QUARANTINE

log = structlog.get_logger("logs.repair")


def adopt(query: duckdb.DuckDBPyConnection, data_dir: Path) -> list[Segment]:
    """Enter complete segments that no tape lists (a crash while moving, a tape that was set aside).

    Files of a move that never completed are removed: their rows are still in the live tables. Damaged
    segments are set aside with a loud line.
    """
    known = {(segment.dt, segment.name) for segment in own(query)}
    for path in (data_dir / FOLDER).glob("*/dt=*/*"):
        if (
            not (data_dir / FOLDER / "requests" / path.parent.name / path.name).exists()
            or path.suffix == ".tmp"
        ):
            path.unlink()
    adopted: list[Segment] = []
    for path in complete(data_dir):
        if (path.parent.name.removeprefix("dt="), path.name) in known:
            continue
        try:
            segment = describe(path, data_dir)
        except (duckdb.Error, OSError) as error:
            _set_aside(named(path), data_dir, str(error))
            continue
        query.begin()
        for table, key in (("steps", ("request_id", "choice")), ("requests", ("request_id", "choice")),
                           ("passes", ("pass_id", "ts"))):  # fmt: skip
            source = "requests" if table == "steps" else table
            match = " AND ".join(f"{table}.{name} = a.{name}" for name in key)
            query.execute(
                f"DELETE FROM {table} USING"
                f" (SELECT DISTINCT {', '.join(key)} FROM read_parquet(?)) a WHERE {match}",
                [str(segment.path(data_dir, source))],
            )
        enter(query, data_dir, segment)
        query.commit()
        adopted.append(segment)
        log.warning("tape_segment_adopted", name=segment.name, day=segment.dt, steps=segment.num_steps)
    return adopted


def verify(query: duckdb.DuckDBPyConnection, data_dir: Path) -> list[Segment]:
    """Read every listed segment through; damaged or missing ones are set aside, loudly, and returned."""
    damaged: list[Segment] = []
    for segment in listed(query):
        try:
            for table in MOVED_TABLES:
                path = str(segment.path(data_dir, table))
                query.execute("SELECT max(hash(t)) FROM read_parquet(?) t", [path]).fetchone()
        except duckdb.Error as error:
            forget(query, segment)
            _set_aside(segment, data_dir, str(error))
            damaged.append(segment)
    return damaged


def _set_aside(segment: Segment, data_dir: Path, reason: str) -> None:
    folder = data_dir / QUARANTINE
    folder.mkdir(exist_ok=True)
    whose = f"{segment.gateway}-" if segment.gateway else ""
    for table in MOVED_TABLES:
        part = segment.path(data_dir, table)
        if part.exists():
            part.rename(folder / f"{whose}{table}-dt={segment.dt}-{segment.name}")
    log.error("tape_segment_quarantined", name=segment.name, reason=reason.splitlines()[0])

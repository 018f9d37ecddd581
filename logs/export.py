"""Traces as files, and what the tape holds in numbers."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from logs.reader import STEP_COLUMNS, Reader, TraceFilter
from logs.rows import STEP_SCHEMA

Format = Literal["jsonl", "parquet"]

_SCHEMA = pa.schema([field for field in STEP_SCHEMA if field.name in STEP_COLUMNS])


def export_trace(reader: Reader, request_id: str, file: IO[bytes], format: Format) -> bool:
    """Write one trace into a binary file; False where it is not on the tape.

    jsonl: for each choice a line {"request": row}, then a line {"step": row} for each of its steps; bytes are
    base64. parquet: the steps of all choices, with the requests rows as JSON under the metadata key
    `requests`.
    """
    rows = reader.choices(request_id)
    if rows:
        write(((row, reader.steps(request_id, row["choice"])) for row in rows), file, format)
    return bool(rows)


def export_all(reader: Reader, path: Path, format: Format, filters: TraceFilter | None = None) -> int:
    """Write every choice that the filters let through to a new file; the number of choices.

    Streams: a few traces in memory at a time. Raises FileExistsError.
    """
    count = 0

    def counted() -> Iterator[tuple[Mapping[str, Any], pa.Table]]:
        nonlocal count
        for choice in reader.every_choice(STEP_COLUMNS, filters):
            count += 1
            yield choice

    with path.open("xb") as file:
        write(counted(), file, format)
    return count


def write(choices: Iterable[tuple[Mapping[str, Any], pa.Table]], file: IO[bytes], format: Format) -> None:
    """Write choices as they come."""
    {"jsonl": _write_jsonl, "parquet": _write_parquet}[format](choices, file)


def _write_jsonl(choices: Iterable[tuple[Mapping[str, Any], pa.Table]], file: IO[bytes]) -> None:
    for row, steps in choices:
        file.write(_line({"request": row}))
        for step in steps.to_pylist():
            file.write(_line({"step": step}))


def _write_parquet(choices: Iterable[tuple[Mapping[str, Any], pa.Table]], file: IO[bytes]) -> None:
    rows: list[Mapping[str, Any]] = []
    with pq.ParquetWriter(file, _SCHEMA, compression="zstd") as writer:
        for row, steps in choices:
            rows.append(row)
            writer.write_table(steps.cast(_SCHEMA))
        writer.add_key_value_metadata({"requests": json.dumps(rows, default=_plain)})


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, default=_plain).encode() + b"\n"


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} has no place in an export")


def stats(reader: Reader) -> dict[str, Any]:
    """What the tape holds: rows, bytes, time span (Unix seconds), answers by finish_reason, segments."""
    segments = reader.segments()
    span = reader.query(
        f"SELECT min(received) AS since, max(received) AS until FROM {reader.sql('requests', ('received',))}"
    ).to_pylist()[0]
    reasons = reader.query(
        "SELECT coalesce(finish_reason, 'unfinished') AS reason, count(*) AS n"
        f" FROM {reader.sql('requests', ('finish_reason',))} GROUP BY reason ORDER BY n DESC"
    ).to_pylist()
    return {
        **{table: _count(reader, table) for table in _KEY},
        **span,
        "finish_reasons": {row["reason"]: row["n"] for row in reasons},
        "segments": len(segments),
        "segment_bytes": sum(segment.bytes for segment in segments),
        "segment_steps": sum(segment.num_steps for segment in segments),
        "file_bytes": sum(file.stat().st_size for file in reader.data_dir.glob("tape.duckdb*")),
    }


_KEY = {"requests": ("request_id",), "steps": ("seq",), "passes": ("pass_id",)}


def _count(reader: Reader, table: str) -> int:
    count: int = reader.query(f"SELECT count(*) FROM {reader.sql(table, _KEY[table])}").column(0)[0].as_py()
    return count

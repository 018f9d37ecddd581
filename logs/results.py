"""Results of queries: rows, Arrow tables, and a table cut up by choice."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

_JSON = ("policy", "sampling", "params", "stop")


def fetch_rows(query: duckdb.DuckDBPyConnection, sql: str, values: Sequence[object]) -> list[dict[str, Any]]:
    """Rows as dicts by column; JSON columns of requests parsed."""
    found = query.execute(sql, list(values))
    names = [column[0] for column in found.description or ()]
    answer = [dict(zip(names, row, strict=True)) for row in found.fetchall()]
    for row in answer:
        for name in _JSON:
            if row.get(name) is not None:
                row[name] = json.loads(row[name])
    return answer


def fetch_table(query: duckdb.DuckDBPyConnection, sql: str, values: Sequence[object]) -> pa.Table:
    """Rows as an Arrow table."""
    relation = query.sql(sql, params=list(values))
    assert relation is not None
    return relation.to_arrow_table()


def split(rows: list[dict[str, Any]], table: pa.Table) -> Iterator[tuple[dict[str, Any], pa.Table]]:
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

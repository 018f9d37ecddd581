"""What the writer commits at once: one transaction, in which the last word on each row wins."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import duckdb
import pyarrow as pa

from gateway.core import PassRecord, Step
from logs.redact import Redact, redacted
from logs.rows import Capture, Decode, Life, pass_table, request_row, request_table, step_table

Key = tuple[str, int]
"""(request_id, choice)."""

_KEYS = {
    "requests": ("trace_no", "request_id", "choice"),
    "steps": ("trace_no", "request_id", "choice", "seq"),
}


class Batch:
    """Rows waiting for one commit. handed_over counts all that was given to it, restated rows included."""

    def __init__(self, capture: Capture, decode: Decode | None, redact: Redact | None) -> None:
        self._capture = capture
        self._decode = decode
        self._redact = redact
        self._steps: dict[tuple[str, int, int], tuple[int, Step]] = {}
        self._on_disk: set[tuple[str, int, int]] = set()
        self.handed_over = 0
        self.requests: dict[Key, Life] = {}
        self.passes: list[PassRecord] = []

    def put(self, step: Step, trace_no: int, restated: bool) -> None:
        """Add a step; a restated one takes the place of its row, here or on disk."""
        key = (step.request_id, step.choice, step.seq)
        if restated and key not in self._steps:
            self._on_disk.add(key)
        self._steps[key] = (trace_no, step)

    def lives(self, known: Mapping[Key, Life]) -> list[Life]:
        """The choices with a row in the batch, as far as they are known."""
        of_steps = (known.get((request_id, choice)) for request_id, choice, _ in self._steps)
        return [*self.requests.values(), *(life for life in of_steps if life is not None)]

    def commit(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Write everything in one transaction and empty the batch; on error nothing is written.

        Raises RedactionFailed and what DuckDB raises.
        """
        lives = list(self.requests.values())
        rows = [request_row(life, self._capture, self._decode) for life in lives]
        steps = step_table(
            [step for _, step in self._steps.values()],
            [number for number, _ in self._steps.values()],
            self._capture,
        )
        if self._redact is not None:
            rows = [redacted(self._redact, "requests", row) for row in rows]
            clean = [redacted(self._redact, "steps", row) for row in steps.to_pylist()]
            steps = pa.Table.from_pylist(clean, schema=steps.schema)
        connection.begin()
        try:
            _replace(connection, "requests", request_table(rows), [life.stored for life in lives])
            _replace(connection, "steps", steps, [key in self._on_disk for key in self._steps])
            _insert(connection, "passes", pass_table(self.passes))
            connection.commit()
        except BaseException:
            # After a fatal error there is no transaction left to roll back.
            with suppress(duckdb.Error):
                connection.rollback()
            raise
        for life in lives:
            life.stored = True
        self.clear()

    def clear(self) -> None:
        """Forget what is waiting."""
        self._steps.clear()
        self._on_disk.clear()
        self.requests.clear()
        self.passes.clear()
        self.handed_over = 0


def _replace(connection: duckdb.DuckDBPyConnection, table: str, rows: pa.Table, stored: list[bool]) -> None:
    old = rows.select(_KEYS[table]).filter(pa.array(stored, pa.bool_()))
    if old.num_rows:
        # Constant bounds let zone maps skip all but the last row groups of a long table.
        numbers = old["trace_no"].to_pylist()
        match = " AND ".join(f"t.{name} = old.{name}" for name in _KEYS[table])
        connection.register("old", old)
        connection.execute(
            f"DELETE FROM {table} t USING old"
            f" WHERE t.trace_no BETWEEN {min(numbers)} AND {max(numbers)} AND {match}"
        )
        connection.unregister("old")
    _insert(connection, table, rows)


def _insert(connection: duckdb.DuckDBPyConnection, table: str, rows: pa.Table) -> None:
    if rows.num_rows:
        connection.register("new", rows)
        connection.execute(f"INSERT INTO {table} BY NAME SELECT * FROM new")
        connection.unregister("new")


def begin(connection: duckdb.DuckDBPyConnection) -> int:
    """Mark what an earlier process left running as interrupted; the last trace number so far."""
    # The first Arrow insert loads libraries for most of a second: better now than on the first request.
    for table, nothing in (("requests", request_table([])), ("steps", step_table([], [], Capture.FULL))):
        connection.register("new", nothing)
        connection.execute(f"INSERT INTO {table} BY NAME SELECT * FROM new")
        connection.unregister("new")
    connection.execute(
        "UPDATE requests SET interrupted = true WHERE finish_reason IS NULL AND interrupted IS NOT true"
    )
    row = connection.execute(
        "SELECT greatest("
        "(SELECT coalesce(max(trace_no), 0) FROM requests), (SELECT coalesce(max(trace_no), 0) FROM steps),"
        "(SELECT coalesce(max(last_no), 0) FROM segments WHERE gateway IS NULL))"
    ).fetchone()
    assert row is not None
    return int(row[0])

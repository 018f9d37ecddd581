"""What the writer commits at once: one transaction, in which the last word on each row wins."""

from __future__ import annotations

import duckdb
import pyarrow as pa

from gateway.core import PassRecord, Step
from logs.rows import Capture, Decode, Life, pass_table, request_row, request_table, step_table

Key = tuple[str, int]
"""(request_id, choice)."""

_KEYS = {
    "requests": ("trace_no", "request_id", "choice"),
    "steps": ("trace_no", "request_id", "choice", "seq"),
}


class Batch:
    """Rows waiting for one commit. handed_over counts all that was given to it, restated rows included."""

    def __init__(
        self, connection: duckdb.DuckDBPyConnection, capture: Capture, decode: Decode | None
    ) -> None:
        self._connection = connection
        self._capture = capture
        self._decode = decode
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

    def touched(self) -> set[Key]:
        """The choices with a row in the batch."""
        return {*self.requests, *((request_id, choice) for request_id, choice, _ in self._steps)}

    def commit(self) -> None:
        """Write everything in one transaction and empty the batch; on error nothing is written."""
        lives = list(self.requests.values())
        requests = request_table([request_row(life, self._capture, self._decode) for life in lives])
        steps = step_table(
            [step for _, step in self._steps.values()],
            [number for number, _ in self._steps.values()],
            self._capture,
        )
        self._connection.begin()
        try:
            self._replace("requests", requests, [life.stored for life in lives])
            self._replace("steps", steps, [key in self._on_disk for key in self._steps])
            self._insert("passes", pass_table(self.passes))
            self._connection.commit()
        except BaseException:
            self._connection.rollback()
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

    def _replace(self, table: str, rows: pa.Table, stored: list[bool]) -> None:
        old = rows.select(_KEYS[table]).filter(pa.array(stored, pa.bool_()))
        if old.num_rows:
            # Constant bounds let zone maps skip all but the last row groups of a long table.
            numbers = old["trace_no"].to_pylist()
            match = " AND ".join(f"t.{name} = old.{name}" for name in _KEYS[table])
            self._connection.register("old", old)
            self._connection.execute(
                f"DELETE FROM {table} t USING old WHERE t.trace_no BETWEEN ? AND ? AND {match}",
                [min(numbers), max(numbers)],
            )
            self._connection.unregister("old")
        self._insert(table, rows)

    def _insert(self, table: str, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        self._connection.register("new", rows)
        self._connection.execute(f"INSERT INTO {table} BY NAME SELECT * FROM new")
        self._connection.unregister("new")


def begin(connection: duckdb.DuckDBPyConnection) -> int:
    """Mark what an earlier process left running as interrupted; the first free trace number."""
    connection.execute(
        "UPDATE requests SET interrupted = true WHERE finish_reason IS NULL AND interrupted IS NOT true"
    )
    row = connection.execute(
        "SELECT greatest("
        "(SELECT coalesce(max(trace_no), 0) FROM requests), (SELECT coalesce(max(trace_no), 0) FROM steps),"
        "(SELECT coalesce(max(last_no), 0) FROM segments))"
    ).fetchone()
    assert row is not None
    return int(row[0]) + 1

"""What people and later systems say of an answer: reviews and task scores, kept beside the traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import duckdb

from logs.reader import Reader

Verdict = Literal["good", "bad", "unsure"]
RECENT = 5000
"""The newest traces among which answers are drawn for review."""


class Feedback:
    """Writes and draws; cursor gives a connection to the open tape for one call, clock is Unix seconds."""

    def __init__(
        self, cursor: Callable[[], duckdb.DuckDBPyConnection], reader: Reader, clock: Callable[[], float]
    ) -> None:
        self._cursor = cursor
        self._reader = reader
        self._clock = clock

    def score(self, request_id: str, name: str, value: float) -> None:
        """Record a task metric of a trace, 0..1."""
        self._cursor().execute(
            "INSERT INTO scores BY NAME SELECT ? AS request_id, ? AS name, ? AS value, ? AS ts",
            [request_id, name, value, self._clock()],
        )

    def review(
        self, request_id: str, verdict: Verdict, note: str | None = None, reviewer: str | None = None
    ) -> None:
        """Record a spot check of a trace."""
        self._cursor().execute(
            "INSERT INTO reviews BY NAME"
            " SELECT ? AS request_id, ? AS verdict, ? AS note, ? AS reviewer, ? AS ts",
            [request_id, verdict, note, reviewer, self._clock()],
        )

    def sample(self, n: int) -> list[dict[str, Any]]:
        """Up to n finished, unreviewed traces drawn at random from the newest, as summaries."""
        requests = self._reader.sql("requests", ("request_id", "trace_no", "finish_reason"))
        drawn = self._reader.query(
            f"SELECT request_id FROM (SELECT request_id, max(trace_no) AS no FROM {requests}"
            " WHERE finish_reason IN ('stop', 'length')"
            " AND request_id NOT IN (SELECT request_id FROM reviews)"
            f" GROUP BY request_id ORDER BY no DESC LIMIT {RECENT}) ORDER BY random() LIMIT {int(n)}"
        )
        found = (self._reader.trace(request_id) for request_id in drawn["request_id"].to_pylist())
        return [summary for summary in found if summary is not None]

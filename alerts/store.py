"""The alerting part of the tape: transitions, changes of alerts, and the outbox of notifications.

All SQL of alerts/ is here. A cursor a call, one call at a time: the tape may be reopened between calls.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import duckdb

from alerts.lifecycle import Alert
from alerts.rollout import Rollout

PENDING, DELIVERED, FAILED, DISABLED = "pending", "delivered", "failed", "disabled"


@dataclass(frozen=True, slots=True)
class Delivery:
    """One notification for one receiver: a row of `deliveries`."""

    id: str
    receiver: str
    subject: str
    body: Mapping[str, Any]
    state: str
    created: float
    attempts: int
    next_try: float
    status: int | None
    error: str | None
    url: str | None
    finished: float | None


class Store:
    """Reads and writes the three tables; every write is committed when it returns."""

    def __init__(self, connect: Callable[[], duckdb.DuckDBPyConnection]) -> None:
        """connect: a fresh cursor of the open tape (logs.schema has the tables)."""
        self._connect = connect
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def _tape(self) -> Iterator[duckdb.DuckDBPyConnection]:
        with self._lock, contextlib.closing(self._connect()) as cursor:
            yield cursor

    def put_transitions(self, rollout: Rollout) -> None:
        """Write those lines of a rollout's history that the tape does not have."""
        plan = json.dumps(rollout.plan.to_dict())
        with self._tape() as cursor:
            known = self._value(cursor, "SELECT count(*) FROM rollouts WHERE salt = ?", [rollout.plan.salt])
            for number, transition in list(enumerate(rollout.history))[known:]:
                row = {
                    **asdict(transition),
                    "name": rollout.plan.name,
                    "salt": rollout.plan.salt,
                    "number": number,
                    "plan": plan,
                }
                self._insert(cursor, "rollouts", row)

    def put_alerts(self, changes: Sequence[tuple[float, Alert]]) -> None:
        """Write that alerts changed their state at a time; a change that is there is left as it is."""
        with self._tape() as cursor:
            for ts, alert in changes:
                row = {
                    "ts": ts,
                    "fingerprint": alert.fingerprint,
                    "name": alert.name,
                    "state": alert.state,
                    "labels": json.dumps(alert.labels),
                    "annotations": json.dumps(alert.annotations),
                }
                known = "SELECT count(*) FROM alerts WHERE ts = ? AND fingerprint = ? AND state = ?"
                if not self._value(cursor, known, [ts, alert.fingerprint, alert.state]):
                    self._insert(cursor, "alerts", row)

    def alert_history(self, limit: int) -> list[dict[str, Any]]:
        """The latest changes of alerts, newest first."""
        rows = self._rows("SELECT * FROM alerts ORDER BY ts DESC LIMIT ?", [limit])
        return [
            {**row, "labels": json.loads(row["labels"]), "annotations": json.loads(row["annotations"])}
            for row in rows
        ]

    def put_delivery(self, id: str, receiver: str, subject: str, body: Mapping[str, Any], now: float) -> None:
        """Put a notification into the outbox; one of this id is left as it is."""
        with self._tape() as cursor:
            if self._value(cursor, "SELECT count(*) FROM deliveries WHERE id = ?", [id]):
                return
            row = {
                "id": id,
                "receiver": receiver,
                "subject": subject,
                "body": json.dumps(body),
                "state": PENDING,
                "created": now,
                "attempts": 0,
                "next_try": now,
            }
            self._insert(cursor, "deliveries", row)

    def due(self, receiver: str, now: float) -> Delivery | None:
        """The oldest pending delivery of a receiver that may be tried now."""
        found = self._deliveries(
            "WHERE receiver = ? AND state = 'pending' AND next_try <= ? ORDER BY created, id LIMIT 1",
            [receiver, now],
        )
        return found[0] if found else None

    def next_try(self, receiver: str) -> float | None:
        """When the receiver's next delivery may be tried; None without one."""
        with self._tape() as cursor:
            row = cursor.execute(
                "SELECT min(next_try) FROM deliveries WHERE receiver = ? AND state = 'pending'", [receiver]
            ).fetchone()
        return None if row is None or row[0] is None else float(row[0])

    def attempted(
        self,
        id: str,
        state: str,
        now: float,
        *,
        status: int | None,
        error: str | None,
        url: str | None,
        next_try: float,
    ) -> None:
        """Write how an attempt went; attempts grows by one."""
        finished = None if state == PENDING else now
        with self._tape() as cursor:
            cursor.execute(
                "UPDATE deliveries SET state = ?, attempts = attempts + 1, status = ?, error = ?, url = ?, "
                "next_try = ?, finished = ? WHERE id = ?",
                [state, status, error, url, next_try, finished, id],
            )

    def disable(self, receiver: str, now: float) -> None:
        """What still waits for this receiver is not sent any more."""
        with self._tape() as cursor:
            cursor.execute(
                "UPDATE deliveries SET state = 'disabled', finished = ? "
                "WHERE receiver = ? AND state = 'pending'",
                [now, receiver],
            )

    def give_up_on_others(self, receivers: Sequence[str], now: float) -> None:
        """What waits for a receiver that is not one of these will not be sent."""
        marks = ", ".join("?" for _ in receivers) or "NULL"
        with self._tape() as cursor:
            cursor.execute(
                "UPDATE deliveries SET state = 'failed', finished = ?, error = 'no receiver of this name' "
                f"WHERE state = 'pending' AND coalesce(receiver NOT IN ({marks}), true)",
                [now, *receivers],
            )

    def is_disabled(self, receiver: str, url: str) -> bool:
        """Whether the receiver's latest finished attempt at this URL was answered 410."""
        with self._tape() as cursor:
            row = cursor.execute(
                "SELECT state FROM deliveries WHERE receiver = ? AND url = ? AND finished IS NOT NULL "
                "AND attempts > 0 ORDER BY finished DESC LIMIT 1",
                [receiver, url],
            ).fetchone()
        return row is not None and row[0] == DISABLED

    def requeue(self, id: str, now: float) -> bool:
        """Make a delivery pending again, its attempts kept; False if there is none of this id."""
        with self._tape() as cursor:
            if not self._value(cursor, "SELECT count(*) FROM deliveries WHERE id = ?", [id]):
                return False
            cursor.execute(
                "UPDATE deliveries SET state = 'pending', next_try = ?, finished = NULL WHERE id = ?",
                [now, id],
            )
        return True

    def deliveries(self, limit: int) -> list[Delivery]:
        """The latest deliveries, newest first."""
        return self._deliveries("ORDER BY created DESC, id LIMIT ?", [limit])

    def delivery(self, id: str) -> Delivery | None:
        """One delivery."""
        found = self._deliveries("WHERE id = ?", [id])
        return found[0] if found else None

    def outcomes(self) -> dict[str, int]:
        """Deliveries by state."""
        rows = self._rows("SELECT state, count(*) AS n FROM deliveries GROUP BY state", [])
        return {row["state"]: row["n"] for row in rows}

    def _deliveries(self, tail: str, values: Sequence[object]) -> list[Delivery]:
        rows = self._rows(f"SELECT * FROM deliveries {tail}", values)
        return [Delivery(**{**row, "body": json.loads(row["body"])}) for row in rows]

    def _rows(self, sql: str, values: Sequence[object]) -> list[dict[str, Any]]:
        with self._tape() as cursor:
            result = cursor.execute(sql, list(values))
            names = [column[0] for column in result.description or ()]
            return [dict(zip(names, row, strict=True)) for row in result.fetchall()]

    def _value(self, cursor: duckdb.DuckDBPyConnection, sql: str, values: Sequence[object]) -> int:
        row = cursor.execute(sql, list(values)).fetchone()
        return int(row[0]) if row is not None else 0

    def _insert(self, cursor: duckdb.DuckDBPyConnection, table: str, row: Mapping[str, object]) -> None:
        columns = ", ".join(f'"{name}"' for name in row)
        marks = ", ".join("?" for _ in row)
        cursor.execute(f'INSERT INTO "{table}" ({columns}) VALUES ({marks})', list(row.values()))

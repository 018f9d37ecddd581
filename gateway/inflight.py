"""Calls under way to a tier elsewhere: which rows wait for one, and which answers have come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass

from gateway.row import Row
from gateway.tier import Distant, Heard, Job
from gateway.trace_context import context_headers


@dataclass(frozen=True, slots=True)
class Landed:
    """What came of a row's call: heard, or the fault that it ended with."""

    row: Row
    job: Job
    heard: Heard | None
    fault: Exception | None


class InFlight:
    """At most one call a row. Everything but the callbacks runs on the engine's thread.

    wake: called from any thread when an answer has come, so that nobody has to look for it.
    """

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._futures: dict[int, Future[Heard]] = {}
        self._come: deque[tuple[Row, Job, Future[Heard]]] = deque()

    def __len__(self) -> int:
        """Rows that wait."""
        return len(self._futures)

    @property
    def landed(self) -> bool:
        """Whether an answer has come that nobody has taken."""
        return bool(self._come)

    def send(self, tier: Distant, row: Row, job: Job, age_s: float) -> None:
        """Ask; the row is in flight until `take` gives its answer or it is dropped."""
        future = tier.send(job, age_s, context_headers(row.request.context))
        self._futures[id(row)] = future
        row.flying = True
        future.add_done_callback(lambda done: self._land(row, job, done))

    def take(self) -> Landed | None:
        """The answer that came first, its row no longer in flight; None when there is none."""
        while self._come:
            row, job, future = self._come.popleft()
            if self._futures.get(id(row)) is not future:
                continue
            self._forget(row)
            try:
                return Landed(row, job, future.result(), None)
            except (Exception, CancelledError) as fault:
                return Landed(row, job, None, fault if isinstance(fault, Exception) else None)
        return None

    def drop(self, row: Row) -> None:
        """Nobody wants the row's answer any more."""
        future = self._futures.get(id(row))
        if future is not None:
            self._forget(row)
            future.cancel()

    def _forget(self, row: Row) -> None:
        del self._futures[id(row)]
        row.flying = False

    def _land(self, row: Row, job: Job, future: Future[Heard]) -> None:
        self._come.append((row, job, future))
        self.wake()

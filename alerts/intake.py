"""From the engine's thread to the monitor's: rows and answers handed over without waiting, then folded."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue

from alerts.answers import Answer, Answers, Row
from alerts.canaries import Canaries, counts
from alerts.drift import Drift
from alerts.liveness import Liveness
from gateway.core import Mode, Step, Tick
from gateway.request import Request, Trace

MOST_QUEUED_ROWS = 200_000
_RECENT = 500


class Intake:
    """An observer of the engine that never blocks. What it queues must be called in order, by one thread."""

    def __init__(self, canaries: Canaries, clock: Callable[[], float]) -> None:
        """canaries: where answers become evidence."""
        self.queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.drift = Drift(canaries.stable.hash)
        self.liveness = Liveness()
        self.recent_agreement: deque[float] = deque(maxlen=_RECENT)
        self.dropped_rows = 0
        self._canaries = canaries
        self._clock = clock
        self._watched = canaries.stable
        self._answers = Answers()
        self._depth = 0
        self._depth_lock = threading.Lock()

    # --- the observer: on the engine's thread, never waits ---

    def on_admit(self, trace: Trace) -> None:
        """A choice was taken in."""
        self.queue.put(lambda: self._admit(trace))

    def on_tick(self, tick: Tick) -> None:
        """Rows of one turn of the engine; beyond the bound they are lost, their answers count as worst."""
        rows = (*tick.steps, *tick.restated)
        if not rows:
            return
        with self._depth_lock:
            fits = self._depth + len(rows) <= MOST_QUEUED_ROWS
            self._depth += len(rows) if fits else 0
        if not fits:
            self.dropped_rows += len(rows)
            lost = {(step.request_id, step.choice) for step in rows}
            self.queue.put(lambda: self._lose(lost))
            return
        self.queue.put(lambda: self._steps(rows))

    def on_finish(self, trace: Trace) -> None:
        """A choice is complete, its audit included."""
        self.queue.put(lambda: self._finish(trace))

    def score(self, request_id: str, name: str, value: float) -> None:
        """A task score in [0, 1]; any thread."""
        self.queue.put(lambda: self._canaries.score(request_id, name, value))

    # --- folding, on the thread ---

    def _admit(self, trace: Trace) -> None:
        request = trace.request
        self._answers.admit(request)
        if request.choice == 0:
            self._canaries.admit(request, self._clock())

    def _steps(self, rows: tuple[Step, ...]) -> None:
        with self._depth_lock:
            self._depth -= len(rows)
        for step in rows:
            self._answers.step(step)

    def _lose(self, lost: set[tuple[str, int]]) -> None:
        for request_id, choice in lost:
            self._answers.lose(request_id, choice)

    def fold_elsewhere(self, request: Request, trace: Trace, rows: Iterable[Row]) -> None:
        """A first choice that another gateway has answered: all of it at once, by the thread that folds."""
        if not counts(request) or not self._canaries.admit_elsewhere(request):
            return
        if trace.finished is None:
            self._canaries.lose(request.id, self._clock())
            return
        self._answers.admit(request)
        for row in rows:
            self._answers.row(request.id, request.choice, row)
        self._finish(trace)

    def _finish(self, trace: Trace) -> None:
        answer = self._answers.finish(trace)
        if answer is None or not counts(trace.request):
            return
        self._canaries.observe(answer, self._clock())
        if answer.arm == "stable":
            self._learn_stable(answer, trace)

    def _learn_stable(self, answer: Answer, trace: Trace) -> None:
        policy = trace.request.policy
        if policy != self._canaries.stable:
            return
        if policy != self._watched:
            self._watched = policy
            self.drift, self.liveness = Drift(policy.hash), Liveness()
        self.drift.observe(answer.values, answer.judged)
        agreement = answer.values["agreement"]
        if answer.judged and agreement is not None:
            self.recent_agreement.append(agreement)
        if policy.mode is Mode.ROUTED:
            self.liveness.decisions(answer.decisions)
            if answer.small_share is not None:
                self.liveness.share(answer.small_share)

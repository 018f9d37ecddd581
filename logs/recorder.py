"""The tape's writer: a bounded queue that never blocks the decode path, and one thread that commits."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

import duckdb
import structlog

from gateway.core import PassRecord, Settled, Step, Tick
from gateway.request import Trace
from logs.batch import Batch, Key, begin
from logs.feedback import Feedback
from logs.lives import Lives
from logs.numbers import Numbers
from logs.reader import Reader
from logs.redact import Redact, RedactionFailed
from logs.repair import adopt, verify
from logs.rows import Capture, Decode
from logs.segments import Segment
from logs.share import Share
from logs.tape import Tape, open_tape
from logs.upkeep import Keep, Upkeep

log = structlog.get_logger("logs.recorder")


@dataclass(frozen=True, slots=True)
class _Admitted:
    trace: Trace


@dataclass(frozen=True, slots=True)
class _Ended:
    trace: Trace


@dataclass(frozen=True, slots=True)
class _Steps:
    steps: list[Step]
    restated: list[Step]
    passed: PassRecord | None
    size: int


@dataclass(frozen=True, slots=True)
class _Settled:
    settled: list[Settled]


@dataclass(frozen=True, slots=True)
class _Barrier:
    reached: threading.Event
    stop: bool = False


class Recorder:
    """Observer of the engine that writes the tape in data_dir.

    queue_rows bounds the rows handed over and not yet on disk. What does not fit is dropped by whole
    request (its later steps too), counted in `dropped` by cause, and its trace is marked incomplete.
    gateway: its name in a fleet, by which its traces are numbered; share: path or URL of the fleet's storage.
    Raises TapeBusy, TapeUnwritable or TapeTooNew where the tape cannot be opened, ShareError where the share
    cannot be used.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        queue_rows: int = 100_000,
        flush_rows: int = 1000,
        flush_s: float = 0.5,
        capture: Capture = Capture.FULL,
        decode: Decode | None = None,
        redact: Redact | None = None,
        keep: Keep | None = None,
        gateway: str | None = None,
        share: str | None = None,
        on_flush: Callable[[float], None] | None = None,
    ) -> None:
        self.data_dir = data_dir
        self.queue_rows = queue_rows
        self.flush_rows = flush_rows
        self.flush_s = flush_s
        self.dropped: Counter[str] = Counter()
        self._tape: Tape = open_tape(data_dir)
        try:
            self.share = None if gateway is None or share is None else Share(share, gateway, data_dir)
        except BaseException:
            self._tape.close()
            raise
        self.quarantined = tuple(self._tape.quarantined)
        self._connection = self._tape.cursor()
        self._writing = threading.Lock()
        self.adopted = tuple(adopt(self._connection, data_dir))
        self._batch = Batch(capture, decode, redact)
        self._on_flush = on_flush
        self._queue: SimpleQueue[_Admitted | _Ended | _Steps | _Settled | _Barrier] = SimpleQueue()
        self._lock = threading.Lock()
        self._depth = 0
        self._open: set[Key] = set()
        self._lost: set[Key] = set()
        self._lives = Lives(self._batch, Numbers(begin(self._connection), gateway), self._count_dropped)
        self._last_warning = float("-inf")
        self._closed = False
        self._upkeep = Upkeep(self._tape.cursor, data_dir, self._writing, keep or Keep(), share=self.share)
        self._upkeep.start()
        self._thread = threading.Thread(target=self._run, name="tape-writer", daemon=True)
        self._thread.start()

    @property
    def queue_depth(self) -> int:
        """Rows handed over and not yet on disk."""
        return self._depth

    def on_admit(self, trace: Trace) -> None:
        """A choice got its slot; its request row is written with finish_reason null."""
        key = (trace.request.id, trace.request.choice)
        self._open.add(key)
        if self._take(1):
            self._queue.put(_Admitted(trace))
        else:
            self._lost.add(key)
            self._count_dropped("queue_full", 1)

    def on_tick(self, tick: Tick) -> None:
        """Rows of one engine tick; kept or dropped together."""
        if tick.settled:
            # Never refused, like an end.
            with self._lock:
                self._depth += len(tick.settled)
        self._hand_over_steps(tick)
        if tick.settled:
            self._queue.put(_Settled(list(tick.settled)))

    def _hand_over_steps(self, tick: Tick) -> None:
        # Lists of our own: the engine may go on filling the tick's.
        steps, restated = list(tick.steps), list(tick.restated)
        if self._lost:
            handed_over = len(steps) + len(restated)
            steps = [s for s in steps if (s.request_id, s.choice) not in self._lost]
            restated = [s for s in restated if (s.request_id, s.choice) not in self._lost]
            self._count_dropped("queue_full", handed_over - len(steps) - len(restated))
        size = len(steps) + len(restated) + (tick.passed is not None)
        if not size:
            return
        if self._take(size):
            self._queue.put(_Steps(steps, restated, tick.passed, size))
            return
        for step in (*steps, *restated):
            if (key := (step.request_id, step.choice)) in self._open:
                self._lost.add(key)
        self._count_dropped("queue_full", size)

    def on_finish(self, trace: Trace) -> None:
        """A choice ended; its request row takes its final form."""
        key = (trace.request.id, trace.request.choice)
        self._open.discard(key)
        # Never refused: there is at most one end per admitted choice, and it tells that steps are missing.
        with self._lock:
            self._depth += 1
        self._queue.put(_Ended(trace))

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until everything handed over before is on disk; False when timeout_s passed first."""
        if self._closed:
            return True
        barrier = _Barrier(threading.Event())
        self._queue.put(barrier)
        return barrier.reached.wait(timeout_s)

    def reader(self) -> Reader:
        """A reader of this tape that sees everything handed over before each call."""
        return Reader(self._tape.cursor, self.data_dir, sync=self.flush)

    def has(self, request_id: str) -> bool:
        """Whether a trace of that id is on disk; what is still queued is not waited for."""
        return Reader(self._tape.cursor, self.data_dir).has(request_id)

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """A connection of one's own to the open tape, for one thread."""
        return self._tape.cursor()

    def feedback(self) -> Feedback:
        """Reviews and scores of this tape's traces."""
        return Feedback(self._tape.cursor, self.reader(), time.time)

    def compact(self) -> tuple[list[Segment], list[Segment]]:
        """Move every finished trace to Parquet now, and apply retention: (segments made, dropped)."""
        self.flush()
        return self._upkeep.run_once(everything=True)

    def close(self) -> None:
        """Write what is queued, checkpoint, release the data directory; a fleet gets all that is over."""
        if self._closed:
            return
        self._closed = True
        self._upkeep.stop()
        barrier = _Barrier(threading.Event(), stop=True)
        self._queue.put(barrier)
        self._thread.join()
        if self.share is not None:
            try:
                self._upkeep.run_once(everything=True, settle_s=0.0)
            except Exception as error:
                # The rows are still live: the next start sends them.
                log.error("tape_upkeep_failed", error=f"{type(error).__name__}: {error}")
        self._connection.close()
        self._tape.close()

    def recover(self) -> list[Segment]:
        """Read every segment through and set damaged ones aside; those. Damage to the live file was dealt
        with on opening: see `quarantined`, `adopted`.
        """
        return verify(self.cursor(), self.data_dir)

    def _take(self, size: int) -> bool:
        with self._lock:
            if self._depth + size > self.queue_rows:
                return False
            self._depth += size
            return True

    def _count_dropped(self, cause: str, rows: int) -> None:
        if not rows:
            return
        with self._lock:
            self.dropped[cause] += rows
            now = time.monotonic()
            quiet = now - self._last_warning < 1.0
            if not quiet:
                self._last_warning = now
        if not quiet:
            log.error("tape_dropping", cause=cause, rows=rows, dropped=dict(self.dropped))

    def _run(self) -> None:
        due: float | None = None
        while True:
            try:
                item = self._queue.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
            except Empty:
                self._commit()
                due = None
                continue
            if isinstance(item, _Barrier):
                self._commit()
                due = None
                item.reached.set()
                if item.stop:
                    return
                continue
            self._fold(item)
            if due is None:
                due = time.monotonic() + self.flush_s
            if self._batch.handed_over >= self.flush_rows or time.monotonic() >= due:
                self._commit()
                due = None

    def _fold(self, item: _Admitted | _Ended | _Steps | _Settled) -> None:
        if isinstance(item, _Steps):
            self._batch.handed_over += item.size
            if item.passed is not None:
                self._batch.passes.append(item.passed)
            for step in item.steps:
                self._lives.step(step, restated=False)
            for step in item.restated:
                self._lives.step(step, restated=True)
        elif isinstance(item, _Settled):
            self._batch.handed_over += len(item.settled)
            for settled in item.settled:
                self._lives.settle(settled)
        elif isinstance(item, _Ended):
            self._batch.handed_over += 1
            key = (item.trace.request.id, item.trace.request.choice)
            self._lives.end(item.trace, lost=key in self._lost)
            self._lost.discard(key)
        else:
            self._batch.handed_over += 1
            self._lives.admit(item.trace)

    def _commit(self) -> None:
        batch = self._batch
        if not batch.handed_over:
            return
        began = time.perf_counter()
        handed_over = batch.handed_over
        try:
            with self._writing:
                batch.commit(self._connection)
        except Exception as error:
            # Decoding goes on whatever becomes of the tape: a full disk costs rows, loudly, never answers.
            cause = "redaction" if isinstance(error, RedactionFailed) else "write_error"
            what = f"{type(error).__name__}: {error}"
            log.error("tape_write_failed", cause=cause, rows=handed_over, error=what)
            self._count_dropped(cause, handed_over)
            self._lives.lose_batch()
            self._reopen_if_closed()
        with self._lock:
            self._depth -= handed_over
        if self._on_flush is not None:
            self._on_flush(time.perf_counter() - began)

    def _reopen_if_closed(self) -> None:
        """Open the file again if the error closed it; until that works, rows are counted as dropped."""
        try:
            self._connection.execute("SELECT 1")
        except duckdb.Error:
            with suppress(duckdb.Error), self._writing:
                self._tape.reopen()
                self._connection = self._tape.cursor()
                log.warning("tape_reopened", data_dir=str(self.data_dir))

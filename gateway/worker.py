"""The thread that owns the engine: requests in through a bounded inbox, deltas out to each client.

Everything that touches the engine runs on this one thread. Observers (the tape, the metrics) are told before
the client is, and must never block.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from gateway.core import AuditStatus, Counts, Delta, Finished, FinishReason, Settled, Tick, Timings
from gateway.engine import Engine
from gateway.request import Request, Served, Trace
from gateway.text import Tokenizer
from gateway.tier import Distant

log = structlog.get_logger(__name__)

Deliver = Callable[[Delta], None]
Key = tuple[str, int]


class QueueFull(Exception):
    """The inbox holds as many requests as it may; try again later."""


class Observer(Protocol):
    """Told of everything on the worker's thread; must not block and must not raise."""

    def on_admit(self, trace: Trace) -> None: ...

    def on_tick(self, tick: Tick) -> None: ...

    def on_finish(self, trace: Trace) -> None: ...


@dataclass(slots=True)
class _Job:
    request: Request
    deliver: Deliver
    finished: Finished | None = None


class Worker:
    """Runs an engine on its own thread. `submit` and `cancel` may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        served: Served,
        observers: Sequence[Observer] = (),
        *,
        max_queue: int = 256,
    ) -> None:
        self.engine = engine
        self.served = served
        self.observers = tuple(observers)
        self.max_queue = max_queue
        self._wake = threading.Condition()
        self._inbox: deque[_Job] = deque()
        self._cancelled: set[str] = set()
        self._jobs: dict[Key, _Job] = {}
        self._stopping = False
        engine.flights.wake = self._awake
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer both models share."""
        return self.engine.tokenizer

    @property
    def vocab_size(self) -> int:
        """Ids that both models' heads have."""
        return self.engine.vocab_size

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.engine.max_model_len

    @property
    def ready(self) -> bool:
        """Whether a request would be taken now."""
        return self._thread.is_alive() and not self._stopping and self.num_waiting < self.max_queue

    @property
    def num_running(self) -> int:
        """Choices that hold KV blocks."""
        return len(self.engine.rows)

    @property
    def num_waiting(self) -> int:
        """Choices that wait for blocks."""
        return len(self._inbox) + len(self.engine.waiting)

    @property
    def kv_usage(self) -> float:
        """Share of KV blocks that rows hold, 0..1; what is kept only for its prefix is given up on demand."""
        pool = self.engine.pool
        return 1 - (pool.num_free + self.engine.prefixes.num_blocks) / pool.num_blocks

    @property
    def distant(self) -> list[Distant]:
        """Tiers that run elsewhere."""
        return list(self.engine.distant.values())

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, request: Request, deliver: Deliver) -> None:
        """Queue a choice; `deliver` gets its deltas on the worker's thread, the last one with `finished`.

        Raises QueueFull; ValueError when the request can never be served or its id and choice are in use.
        """
        self.engine.check(request)
        key = (request.id, request.choice)
        with self._wake:
            if self._stopping or self.num_waiting >= self.max_queue:
                raise QueueFull
            if key in self._jobs:
                raise ValueError(f"request {request.id} choice {request.choice} is already running")
            job = _Job(request, deliver)
            self._jobs[key] = job
            self._inbox.append(job)
            self._wake.notify_all()

    def cancel(self, request_id: str) -> None:
        """End all choices of a request before the next pass; their last delta has finish reason `abort`."""
        with self._wake:
            self._cancelled.add(request_id)
            self._wake.notify_all()

    def settle(self, timeout_s: float = 30.0) -> bool:
        """Wait until every choice whose client has its answer is complete on the tape; False on time-out."""
        with self._wake:
            pending = {key for key, job in self._jobs.items() if job.finished is not None}
            return self._wake.wait_for(lambda: not (pending & self._jobs.keys()), timeout_s)

    def stop(self, drain_s: float = 0.0) -> None:
        """Take no more requests, let running ones finish for drain_s seconds, abort the rest, then end."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
            self._wake.wait_for(lambda: not self._jobs, drain_s)
            self._cancelled.update(key[0] for key in self._jobs)
            self._wake.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:
            # A bug in the engine itself: nobody may wait for an answer that will not come.
            log.exception("engine_died")
            self._die(f"the engine stopped: {error}")

    def _turn(self) -> bool:
        """Take what arrived, run one tick; False when the thread should end."""
        with self._wake:
            self._wake.wait_for(self._has_work)
            if self._stopping and not self._jobs:
                return False
            arrived, cancelled = list(self._inbox), set(self._cancelled)
            self._inbox.clear()
            self._cancelled.clear()
        for job in arrived:
            self._tell("on_admit", Trace(job.request, self.served))
            self.engine.add(job.request)
        for request_id in cancelled:
            self._publish(self.engine.cancel(request_id))
        if self.engine.runnable:
            self._publish(self.engine.tick())
        return True

    def _publish(self, tick: Tick) -> None:
        self._tell("on_tick", tick)
        self._fan_out(tick.deltas)
        self._settle(tick.settled)

    def _has_work(self) -> bool:
        ends = self._stopping and not self._jobs
        return bool(self._inbox or self._cancelled or ends or self.engine.runnable)

    def _awake(self) -> None:
        with self._wake:
            self._wake.notify_all()

    def _die(self, error: str) -> None:
        with self._wake:
            self._stopping = True
            jobs = list(self._jobs.values())
        for job in (j for j in jobs if j.finished is None):
            now = self.engine.clock()
            timings = Timings(received=job.request.received, finished=now)
            done = Finished(FinishReason.ERROR, Counts(), timings, error=error)
            self._fan_out([Delta(job.request.id, job.request.choice, "", (), done)])
        lost = [
            Settled(
                job.request.id,
                job.request.choice,
                AuditStatus.LOST if job.request.audited else AuditStatus.NOT_CHOSEN,
            )
            for job in jobs
        ]
        self._settle(lost)

    def _fan_out(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            job = self._jobs[delta.request_id, delta.choice]
            job.finished = delta.finished
            try:
                job.deliver(delta)
            except Exception:
                # A client that went away in the meantime must not take the engine with it.
                log.exception("deliver_failed", request_id=delta.request_id)
                self.cancel(delta.request_id)

    def _settle(self, settled: Sequence[Settled]) -> None:
        for choice in settled:
            job = self._jobs[choice.request_id, choice.choice]
            if job.finished is None:
                raise AssertionError(f"{choice.request_id} settled without having finished")
            self._tell("on_finish", Trace(job.request, self.served, job.finished, choice.audit))
        with self._wake:
            for choice in settled:
                del self._jobs[choice.request_id, choice.choice]
            self._wake.notify_all()

    def _tell(self, event: str, what: Trace | Tick) -> None:
        for observer in self.observers:
            try:
                getattr(observer, event)(what)
            except Exception:
                log.exception("observer_failed", observer=type(observer).__name__)

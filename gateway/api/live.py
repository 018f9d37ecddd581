"""One client's request while the engine works on it: submit, follow, cancel."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from gateway.core import Delta, Finished, FinishReason
from gateway.request import Request, Served
from gateway.text import Tokenizer


class Engine(Protocol):
    """What the API needs of the worker (the tests' fake is the other implementation)."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def served(self) -> Served: ...
    @property
    def ready(self) -> bool: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def kv_usage(self) -> float: ...

    def submit(self, request: Request, deliver: Callable[[Delta], None]) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def settle(self, timeout_s: float = ...) -> bool: ...


class Failed(Exception):
    """The engine gave up on a choice; the message says why, retry_after_s when trying again may help."""

    def __init__(self, why: str, retry_after_s: float | None = None) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


class Cancelled(Exception):
    """The request was ended from outside: by the gateway shutting down."""


class TooLate(Exception):
    """The request outlived its deadline."""


class Live:
    """The choices of one request, running; deltas arrive from the worker's thread.

    Memory is bounded by the request's own max_tokens, however slowly the client reads.
    """

    def __init__(self, engine: Engine, requests: tuple[Request, ...]) -> None:
        self.requests = requests
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Delta] = asyncio.Queue()
        self._open = set(range(len(requests)))
        self.ended: list[Finished] = []

    @property
    def id(self) -> str:
        """The trace id."""
        return self.requests[0].id

    @property
    def done(self) -> bool:
        """Whether every choice has ended."""
        return not self._open

    def start(self) -> None:
        """Hand all choices to the engine; when one does not fit the queue, none stays."""
        try:
            for request in self.requests:
                self._engine.submit(request, self._deliver)
        except BaseException:
            self._engine.cancel(self.id)
            raise

    def cancel(self) -> None:
        """Free the slots of the choices that still run; harmless when none does."""
        if self._open:
            self._engine.cancel(self.id)

    async def deltas(self, beat_s: float, life_s: float) -> AsyncIterator[Delta | None]:
        """Deltas in the order they were committed until every choice has ended; None when nothing came
        for beat_s seconds. Raises TooLate after life_s seconds, Failed or Cancelled."""
        deadline = self._loop.time() + life_s
        while self._open:
            left = deadline - self._loop.time()
            if left <= 0:
                raise TooLate
            try:
                delta = await asyncio.wait_for(self._queue.get(), min(beat_s, left))
            except TimeoutError:
                if left > beat_s:
                    yield None
                continue
            if delta.finished is not None:
                self._open.discard(delta.choice)
                self.ended.append(delta.finished)
                if delta.finished.reason is FinishReason.ERROR:
                    why = delta.finished.error or "the engine failed on this request"
                    raise Failed(why, delta.finished.retry_after_s)
                if delta.finished.reason is FinishReason.ABORT:
                    raise Cancelled("the request was aborted")
            yield delta

    def _deliver(self, delta: Delta) -> None:
        # A loop that is closed belongs to a gateway that has shut down: nobody waits any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._queue.put_nowait, delta)

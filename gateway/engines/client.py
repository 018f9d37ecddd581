"""Calls to an engine elsewhere: one pool of HTTP/1.1 keep-alive connections on an event loop of its own.

`submit` may be called from any thread; what comes of a query is told through a Future. A call is tried again
within the query's deadline, unless the engine says that it is the request's fault. When too many calls fail
in a row nobody waits any more, until the canary is answered as it was at the start.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import httpx
import structlog

from gateway.engines.health import Breaker, State, backoff_s
from gateway.engines.query import (
    Busy,
    Call,
    Dialect,
    EngineFault,
    Malformed,
    Query,
    Refused,
    Swapped,
    Unavailable,
)
from gateway.engines.vllm import CachedRows, Generate
from gateway.sampling import Reading

log = structlog.get_logger(__name__)

T = TypeVar("T")

CONNECT_S = 5.0
OUTCOMES = ("ok", "busy", "refused", "failed")
SHORT_ID = 80
"""Characters of a request id that fit into the ids of its calls."""


@dataclass(frozen=True, slots=True)
class Reach:
    """How an engine is reached. timeout_s: of one try. max_in_flight: queries at a time, over all rows.
    failures, pause_s: of the breaker. check_every_s: between canaries while all is well."""

    base_url: str
    api_key: str | None = None
    timeout_s: float = 30.0
    max_in_flight: int = 64
    failures: int = 5
    pause_s: float = 2.0
    check_every_s: float = 86_400.0
    affinity_header: str = "x-session-id"


@dataclass(frozen=True, slots=True)
class Scored:
    """readings: one a position. ms: from handing the query over to its answer, tries and waits included."""

    readings: list[Reading]
    ms: float


class Probe(Protocol):
    """Finds out how an engine is to be asked, and whether it is still the one it was."""

    async def connect(self, http: httpx.AsyncClient) -> Dialect:
        """Raises EngineFault naming what the server lacks."""
        ...

    async def check(self, ask: Callable[[Query], Coroutine[Any, Any, list[Reading]]]) -> None:
        """Raises EngineFault when the engine answers otherwise than at connect."""
        ...


class Client:
    """One engine. `connect` first; `close` at the end. outcomes: tries by how they ended."""

    def __init__(
        self,
        reach: Reach,
        probe: Probe,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.reach = reach
        self.breaker = Breaker(reach.failures, reach.pause_s, time.monotonic)
        self.num_in_flight = 0
        self._probe = probe
        self.outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._dialect: Dialect | None = None
        self._ids = itertools.count()
        self._salt = secrets.token_hex(4)
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(reach.max_in_flight)
        self._http = httpx.AsyncClient(
            base_url=reach.base_url,
            headers={"authorization": f"Bearer {reach.api_key}"} if reach.api_key else {},
            timeout=httpx.Timeout(reach.timeout_s, connect=min(CONNECT_S, reach.timeout_s), pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=30),
            transport=transport,
            trust_env=False,
        )
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-calls", daemon=True)
        self._thread.start()
        self._guard: Future[None] | None = None

    def connect(self) -> None:
        """Probe the engine and start watching it; raises EngineFault."""
        self._dialect = self._run(self._probe.connect(self._http)).result()
        self._guard = self._run(self._watch_over())

    def submit(self, query: Query) -> Future[Scored]:
        """Ask; the Future fails with Unavailable (also at the deadline) or Refused. Cancelling it drops the
        call."""
        return self._run(self._score(query))

    def close(self) -> None:
        """Drop what is under way and end the thread."""

        async def drop() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._http.aclose()

        self._run(drop()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # ---- on the loop

    async def _score(self, query: Query) -> Scored:
        began = time.monotonic()
        self.num_in_flight += 1
        try:
            async with asyncio.timeout(query.deadline - began), self._slots:
                readings = await self._until_answered(query)
        except TimeoutError:
            raise Unavailable("no answer before the request's deadline") from None
        finally:
            self.num_in_flight -= 1
        return Scored(readings, (time.monotonic() - began) * 1e3)

    async def _until_answered(self, query: Query) -> list[Reading]:
        for tries in itertools.count():
            if not self.breaker.closed:
                raise Unavailable(self.breaker.why, self.breaker.trial_in_s)
            try:
                return await self._try(query)
            except Busy as busy:
                # It is alive and says so: no failure of the engine's.
                await asyncio.sleep(backoff_s(tries, busy.retry_after_s))
            except Refused:
                raise
            except EngineFault as fault:
                self._failed(str(fault))
                if self.breaker.closed:
                    await asyncio.sleep(backoff_s(tries, fault.retry_after_s))
        raise AssertionError("counting ended")

    async def _try(self, query: Query) -> list[Reading]:
        """One try, counted by the breaker when it succeeds."""
        outcome = "failed"
        try:
            readings = await self._ask(query)
            outcome = "ok"
        except Busy:
            outcome = "busy"
            raise
        except Refused:
            outcome = "refused"
            raise
        finally:
            self.outcomes[outcome] += 1
        if self.breaker.closed:
            self.breaker.succeeded()
        return readings

    async def _ask(self, query: Query) -> list[Reading]:
        dialect = self._dialect
        assert dialect is not None, "connect comes first"
        try:
            return await ask(self._http, dialect, query, self._headers(query))
        except CachedRows:
            assert isinstance(dialect, Generate)
            return await ask(self._http, dialect.documented, query, self._headers(query))

    def _headers(self, query: Query) -> dict[str, str]:
        # Unique: another tokentape refuses an id that it has seen.
        call = f"{query.request_id[:SHORT_ID]}.{query.choice}.{query.position}.{self._salt}{next(self._ids)}"
        return {**query.headers, self.reach.affinity_header: query.affinity, "x-request-id": call}

    def _failed(self, why: str) -> None:
        was_closed = self.breaker.closed
        self.breaker.failed(why)
        if was_closed and not self.breaker.closed:
            log.error("engine_unavailable", url=self.reach.base_url, why=why)

    async def _watch_over(self) -> None:
        """The canary: now and then while all is well, and as the trial while the breaker is open."""
        checked = time.monotonic()
        while True:
            due = time.monotonic() - checked >= self.reach.check_every_s
            if self.breaker.state is State.OPEN and self.breaker.trial_in_s == 0:
                self.breaker.try_again()
                due = True
            if due:
                checked = time.monotonic()
                await self._check()
            await asyncio.sleep(min(self.reach.pause_s, self.reach.check_every_s) / 4)

    async def _check(self) -> None:
        trial = self.breaker.state is State.HALF_OPEN
        try:
            await self._probe.check(self._ask)
        except Swapped as swapped:
            log.error("engine_swapped", url=self.reach.base_url, why=str(swapped))
            self.breaker.failed(str(swapped))
            self.breaker.open(str(swapped))
        except EngineFault as fault:
            self._failed(str(fault))
        else:
            self.breaker.succeeded()
            if trial:
                log.info("engine_available", url=self.reach.base_url)


async def ask(
    http: httpx.AsyncClient, dialect: Dialect, query: Query, headers: dict[str, str]
) -> list[Reading]:
    """All calls of a query, side by side, and its readings; raises EngineFault."""
    calls = dialect.calls(query)
    if len(calls) == 1:
        return dialect.readings(query, [await post(http, calls[0], headers)])
    tasks = [
        asyncio.ensure_future(post(http, call, {**headers, "x-request-id": f"{headers['x-request-id']}.{i}"}))
        for i, call in enumerate(calls)
    ]
    try:
        return dialect.readings(query, await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def post(http: httpx.AsyncClient, call: Call, headers: dict[str, str]) -> Any:
    """One call's JSON; raises EngineFault."""
    try:
        answer = await http.post(call.path, json=call.body, headers=headers)
    except httpx.HTTPError as error:
        raise EngineFault(f"{call.path}: {type(error).__name__}: {error}".rstrip(": ")) from None
    if answer.status_code == 429:
        raise Busy(f"{call.path}: 429", _retry_after(answer))
    if answer.status_code in (400, 413, 422):
        raise Refused(f"{call.path}: {answer.status_code}: {answer.text[:300]}")
    if answer.status_code != 200:
        raise EngineFault(f"{call.path}: {answer.status_code}: {answer.text[:300]}", _retry_after(answer))
    try:
        return answer.json()
    except ValueError:
        raise Malformed(f"{call.path}: the answer is not JSON") from None


def _retry_after(answer: httpx.Response) -> float | None:
    try:
        return max(0.0, float(answer.headers["retry-after"]))
    except (KeyError, ValueError):
        return None

"""Calls to an engine elsewhere: tries, patience, the breaker and the canary. No socket is opened."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from gateway.core import Sampling
from gateway.engines.client import Client, Reach
from gateway.engines.completions import Completions
from gateway.engines.health import Breaker, State, backoff_s
from gateway.engines.query import Dialect, Query, Refused, Swapped, Unavailable

GREEDY = Sampling(max_tokens=1, seed=7, temperature=0.0)
QUICK = Reach("http://engine", timeout_s=2.0, failures=3, pause_s=0.05, check_every_s=3600.0)


def query(seconds: float = 5.0) -> Query:
    return Query(
        prefix=(1, 2),
        draft=(3,),
        sampling=GREEDY,
        choice=0,
        position=0,
        num_topk=5,
        deadline=time.monotonic() + seconds,
        request_id="r",
        affinity="r",
        headers={"traceparent": "00-aa-bb-01"},
    )


def right(body: dict[str, Any]) -> httpx.Response:
    told = {"tokens": ["token_id:4"], "token_logprobs": [-0.1]}
    told |= {"top_logprobs": [{"token_id:4": -0.1, "token_id:5": -3.0}]}
    choices = [{"index": i, "text": "", "logprobs": told} for i, _ in enumerate(body["prompt"])]
    return httpx.Response(200, json={"choices": choices})


class Server:
    """Answers in turn with what `script` holds, and from then on rightly."""

    def __init__(self, *script: httpx.Response | Exception | str) -> None:
        self.script = list(script)
        self.requests: list[httpx.Request] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        said = self.script.pop(0) if self.script else "right"
        if isinstance(said, Exception):
            raise said
        return right(json.loads(request.content)) if isinstance(said, str) else said


class Canary:
    """A probe whose check fails with what `fault` says."""

    def __init__(self) -> None:
        self.fault: Exception | None = None
        self.checks = 0

    async def connect(self, http: httpx.AsyncClient) -> Dialect:
        return Completions("m", 100)

    async def check(self, ask: Callable[..., Any]) -> None:
        self.checks += 1
        if self.fault is not None:
            raise self.fault


@contextmanager
def client(server: Server, reach: Reach = QUICK, canary: Canary | None = None) -> Iterator[Client]:
    made = Client(reach, canary or Canary(), transport=httpx.MockTransport(server))
    made.connect()
    try:
        yield made
    finally:
        made.close()


def wait_for(holds: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        threading.Event().wait(0.005)


FAULTS = [
    httpx.Response(500, text="out of memory"),
    httpx.Response(503, headers={"retry-after": "0.01"}),
    httpx.ConnectError("refused"),
    httpx.ReadError("reset"),
    httpx.ReadTimeout("slow"),
    httpx.Response(200, text="<html>"),
    httpx.Response(200, json={"choices": []}),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: getattr(f, "status_code", type(f).__name__))
def test_a_failed_try_is_tried_again(fault: httpx.Response | Exception) -> None:
    server = Server(fault)
    with client(server) as c:
        assert [r.token for r in c.submit(query()).result(5).readings] == [4, 4]
    assert len(server.requests) == 2


def test_calls_carry_the_trace_context_an_affinity_key_and_an_id_that_is_never_the_same() -> None:
    server = Server(httpx.Response(500))
    with client(server, Reach("http://engine", api_key="k", pause_s=0.05)) as c:
        c.submit(query()).result(5)
    assert [r.headers["traceparent"] for r in server.requests] == ["00-aa-bb-01"] * 2
    assert [r.headers["x-session-id"] for r in server.requests] == ["r", "r"]
    assert [r.headers["authorization"] for r in server.requests] == ["Bearer k"] * 2
    assert len({r.headers["x-request-id"] for r in server.requests}) == 2


def test_what_the_engine_says_is_the_requests_fault_is_not_tried_again_and_opens_nothing() -> None:
    server = Server(*[httpx.Response(400, text="too long")] * 9)
    with client(server) as c:
        for _ in range(5):
            with pytest.raises(Refused, match="too long"):
                c.submit(query()).result(5)
        assert c.breaker.closed
    assert len(server.requests) == 5


def test_a_busy_engine_is_waited_for_as_long_as_it_says_and_opens_nothing() -> None:
    server = Server(*[httpx.Response(429, headers={"retry-after": "0.03"})] * 5)
    with client(server) as c:
        began = time.monotonic()
        c.submit(query()).result(5)
        assert time.monotonic() - began >= 5 * 0.03
        assert c.breaker.closed


def test_nobody_waits_beyond_the_requests_deadline() -> None:
    with client(Server(httpx.Response(429, headers={"retry-after": "60"}))) as c:
        began = time.monotonic()
        with pytest.raises(Unavailable, match="deadline"):
            c.submit(query(0.2)).result(5)
        assert time.monotonic() - began < 2


def test_the_breaker_opens_after_failures_in_a_row_and_the_canary_closes_it() -> None:
    server, canary = Server(*[httpx.ConnectError("refused")] * 3), Canary()
    canary.fault = Unavailable("still down")
    with client(server, canary=canary) as c:
        with pytest.raises(Unavailable, match="refused"):
            c.submit(query()).result(5)
        # Open: nobody's request is sent, although the server would answer by now.
        with pytest.raises(Unavailable):
            c.submit(query()).result(5)
        assert len(server.requests) == 3
        wait_for(lambda: canary.checks >= 2)
        assert not c.breaker.closed
        canary.fault = None
        wait_for(lambda: c.breaker.closed)
        c.submit(query()).result(5)


def test_a_model_swapped_under_us_is_asked_no_more_until_it_is_the_old_one_again() -> None:
    server, canary = Server(), Canary()
    with client(server, Reach("http://engine", pause_s=0.05, check_every_s=0.05), canary) as c:
        c.submit(query()).result(5)
        canary.fault = Swapped("another model")
        wait_for(lambda: not c.breaker.closed)
        with pytest.raises(Unavailable, match="another model"):
            c.submit(query()).result(5)
        canary.fault = None
        wait_for(lambda: c.breaker.closed)
        c.submit(query()).result(5)


def test_no_more_queries_are_under_way_than_may_be() -> None:
    most, now, gate = 0, 0, threading.Event()

    async def slow(request: httpx.Request) -> httpx.Response:
        nonlocal most, now
        import asyncio

        now += 1
        most = max(most, now)
        while not gate.is_set():
            await asyncio.sleep(0.005)
        now -= 1
        return right(json.loads(request.content))

    made = Client(Reach("http://engine", max_in_flight=3), Canary(), transport=httpx.MockTransport(slow))
    made.connect()
    try:
        futures = [made.submit(query()) for _ in range(10)]
        wait_for(lambda: now == 3)
        gate.set()
        assert all(f.result(5).readings for f in futures)
        assert most == 3
    finally:
        made.close()


def test_a_breakers_pauses_double_and_a_late_answer_does_not_close_it() -> None:
    now = [0.0]
    breaker = Breaker(2, 1.0, lambda: now[0])
    breaker.failed("a")
    breaker.succeeded()
    breaker.failed("b")
    assert breaker.state is State.CLOSED
    breaker.failed("c")
    assert (breaker.state, breaker.why, breaker.trial_in_s) == (State.OPEN, "c", 1.0)
    breaker.succeeded()
    assert breaker.state is State.OPEN
    for pause in (2.0, 4.0, 8.0):
        breaker.try_again()
        breaker.failed("d")
        assert (breaker.state, breaker.trial_in_s) == (State.OPEN, pause)
    breaker.try_again()
    breaker.succeeded()
    assert breaker.state is State.CLOSED


def test_backoff_is_what_the_server_said_or_a_random_share_of_a_doubling_time() -> None:
    assert backoff_s(9, 0.5) == 0.5
    for tries in range(12):
        waits = [backoff_s(tries, None) for _ in range(200)]
        assert min(waits) >= 0
        assert max(waits) <= min(5.0, 0.1 * 2**tries)
    assert len({backoff_s(3, None) for _ in range(20)}) > 10

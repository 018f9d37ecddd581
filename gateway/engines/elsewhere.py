"""A large model on an engine elsewhere, as the tier that our engine drives."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future

from gateway.core import Sampling
from gateway.engines.client import Client, Scored
from gateway.engines.query import Query, Refused, Unavailable
from gateway.load import CostTable
from gateway.tier import Heard, Job, LargeFailed

SIZES = (1, 2, 4, 8, 16, 33)
"""Positions a call is timed with."""


class Elsewhere:
    """client: connected. life_s: how old a request may get. num_topk: top logprobs asked for at least."""

    def __init__(self, client: Client, vocab_size: int, life_s: float, num_topk: int) -> None:
        self.client = client
        self.vocab_size = vocab_size
        self._life_s = life_s
        self._num_topk = num_topk

    def send(self, job: Job, age_s: float, headers: Mapping[str, str]) -> Future[Heard]:
        """Ask for what the large model says at the job's positions."""
        first = job.asks[0]
        asked = self.client.submit(
            Query(
                prefix=tuple(job.prefix),
                draft=tuple(job.draft),
                sampling=first.sampling,
                choice=first.choice,
                position=first.position,
                num_topk=max(self._num_topk, *(ask.num_topk for ask in job.asks)),
                deadline=time.monotonic() + self._life_s - age_s,
                request_id=job.request_id,
                affinity=job.request_id,
                headers=headers,
            )
        )
        heard: Future[Heard] = Future()
        heard.add_done_callback(lambda done: asked.cancel() if done.cancelled() else None)
        asked.add_done_callback(lambda done: _pass_on(done, heard))
        return heard

    @property
    def available(self) -> bool:
        """Whether calls go out."""
        return self.client.breaker.closed

    @property
    def outcomes(self) -> dict[str, int]:
        """Tries so far by how they ended."""
        return dict(self.client.outcomes)

    def close(self) -> None:
        """Drop all calls and the connections."""
        self.client.close()

    def costs(self, prefix: list[int]) -> CostTable:
        """Milliseconds of a call by its positions, the least of three tries each; raises EngineFault."""
        ms = []
        for size in SIZES:
            ms.append(min(self._timed(prefix, size - 1) for _ in range(3)))
        # A call is no cheaper for asking more: where it seems so, something was in the way.
        for i in range(len(ms) - 2, -1, -1):
            ms[i] = min(ms[i], ms[i + 1])
        return CostTable(SIZES, tuple(ms))

    def _timed(self, prefix: list[int], num_drafts: int) -> float:
        query = Query(
            prefix=tuple(prefix),
            draft=tuple(prefix[i % len(prefix)] for i in range(num_drafts)),
            sampling=Sampling(max_tokens=1, seed=0, temperature=0.0),
            choice=0,
            position=0,
            num_topk=self._num_topk,
            deadline=time.monotonic() + self._life_s,
            request_id="timing",
            affinity="timing",
        )
        return self.client.submit(query).result().ms


def _pass_on(asked: Future[Scored], heard: Future[Heard]) -> None:
    """Hand a query's outcome over, faults in the engine's own words; runs on the client's thread."""
    if asked.cancelled() or not heard.set_running_or_notify_cancel():
        return
    fault = asked.exception()
    if fault is None:
        scored = asked.result()
        heard.set_result(Heard(scored.readings, scored.ms))
    elif isinstance(fault, Unavailable):
        heard.set_exception(LargeFailed(str(fault), fault.retry_after_s or 1.0))
    elif isinstance(fault, Refused):
        heard.set_exception(LargeFailed(str(fault), None))
    else:
        heard.set_exception(fault)

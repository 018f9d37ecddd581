"""What the writer remembers of each choice while rows of it may still come."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from gateway.core import Settled, Step
from gateway.request import Trace
from logs.batch import Batch, Key
from logs.numbers import Numbers
from logs.rows import Life

FINISHED_KEPT = 1024
"""Choices remembered after their end until they settle, so that a late audit reaches their request row."""

NUMBERS_KEPT = 20_000
"""Request ids whose trace number is remembered, for their later choices and late audits."""


class Lives:
    """Folds what the engine hands over into a batch; for the writer thread alone.

    count_dropped(cause, rows) is told of rows that have no place on the tape.
    """

    def __init__(self, batch: Batch, trace_nos: Numbers, count_dropped: Callable[[str, int], None]) -> None:
        self._batch = batch
        self._trace_nos = trace_nos
        self._count_dropped = count_dropped
        self._lives: dict[Key, Life] = {}
        self._ended: OrderedDict[Key, None] = OrderedDict()
        self._numbers: OrderedDict[str, int] = OrderedDict()

    def admit(self, trace: Trace) -> None:
        """A choice begins."""
        self._know(trace)

    def end(self, trace: Trace, lost: bool) -> None:
        """A choice ends; lost: steps of it were dropped on the way here."""
        key, life = self._know(trace)
        life.incomplete = life.incomplete or lost
        if life.audit is not None:
            del self._lives[key]
            return
        self._ended[key] = None
        while len(self._ended) > FINISHED_KEPT:
            oldest, _ = self._ended.popitem(last=False)
            del self._lives[oldest]

    def step(self, step: Step, restated: bool) -> None:
        """A row of a choice, new or restated."""
        key = (step.request_id, step.choice)
        life = self._lives.get(key)
        number = life.trace_no if life is not None else self._numbers.get(step.request_id)
        if number is None:
            self._count_dropped("unknown_request", 1)
            return
        if life is not None:
            if life.incomplete:
                # A gap must stay the last thing a trace has: what remains is a prefix that replays.
                self._count_dropped("incomplete", 1)
                return
            life.see(step)
            if key in self._ended:
                self._batch.requests[key] = life
        self._batch.put(step, number, restated)

    def settle(self, settled: Settled) -> None:
        """Nothing more will come of a choice."""
        key = (settled.request_id, settled.choice)
        life = self._lives.get(key)
        if life is None:
            return
        life.audit = settled.audit
        if key in self._ended:
            self._batch.requests[key] = life
            del self._ended[key], self._lives[key]

    def lose_batch(self) -> None:
        """The batch could not be written: its choices have a gap from here on."""
        for life in self._batch.lives(self._lives):
            life.incomplete = True
        self._batch.clear()

    def _know(self, trace: Trace) -> tuple[Key, Life]:
        key = (trace.request.id, trace.request.choice)
        life = self._lives.get(key)
        if life is None:
            life = self._lives[key] = Life(self._number(trace.request.id), trace, self._trace_nos.gateway)
        life.trace = trace
        self._batch.requests[key] = life
        return key, life

    def _number(self, request_id: str) -> int:
        number = self._numbers.get(request_id)
        if number is None:
            number = self._numbers[request_id] = self._trace_nos.next()
            if len(self._numbers) > NUMBERS_KEPT:
                self._numbers.popitem(last=False)
        return number

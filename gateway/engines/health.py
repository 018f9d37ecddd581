"""Whether an engine elsewhere may be asked: a circuit breaker whose trial call is the canary.

closed: calls go out. open: too many failed in a row, or the engine was found to be another one; nobody waits
for it. half_open: the canary is on its way. A request is never the trial, so an engine that came back with
other weights is not believed by accident. (Nygard, Release It!, "Circuit Breaker".)
"""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import StrEnum

LONGEST_PAUSE_S = 60.0
"""The pause between trials doubles up to this."""

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 5.0
"""Between tries of one call."""


class State(StrEnum):
    """Of a circuit breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """failures: failed calls in a row that open it. pause_s: from opening to the first trial. clock: in s."""

    def __init__(self, failures: int, pause_s: float, clock: Callable[[], float]) -> None:
        self.state = State.CLOSED
        self.why = ""
        self._failures = failures
        self._first_pause_s = self._pause_s = pause_s
        self._clock = clock
        self._in_a_row = 0
        self._trial_at = 0.0

    @property
    def closed(self) -> bool:
        """Whether calls may go out."""
        return self.state is State.CLOSED

    @property
    def trial_in_s(self) -> float:
        """Seconds until the next trial; 0 when it is due."""
        return max(0.0, self._trial_at - self._clock())

    def succeeded(self) -> None:
        """A call, or the trial, brought a usable answer. A call that was under way when it opened changes
        nothing: only the trial closes it."""
        if self.state is not State.OPEN:
            self.state, self._in_a_row, self._pause_s = State.CLOSED, 0, self._first_pause_s

    def failed(self, why: str) -> None:
        """A call, or the trial, failed."""
        self._in_a_row += 1
        if self.state is State.HALF_OPEN:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        if self.state is State.HALF_OPEN or (self.closed and self._in_a_row >= self._failures):
            self.open(why)

    def open(self, why: str) -> None:
        """Let nothing out until a trial succeeds."""
        self.state, self.why = State.OPEN, why
        self._trial_at = self._clock() + self._pause_s

    def try_again(self) -> None:
        """The trial goes out."""
        self.state = State.HALF_OPEN


def backoff_s(tries: int, retry_after_s: float | None) -> float:
    """How long to wait after the tries-th failure: what the server said, else a random share of a time that
    doubles ("full jitter"), so that many rows do not come back at once."""
    if retry_after_s is not None:
        return retry_after_s
    return random.uniform(0, min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0**tries))

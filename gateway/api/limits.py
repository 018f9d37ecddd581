"""How much one key may ask for, and how long a new request would wait."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.api.errors import ApiError
from gateway.core import Timings

LONGEST_RETRY_S = 600
EMA = 0.9


@dataclass(slots=True)
class _Account:
    """One key's requests now, and the tokens it may still spend (negative: a debt)."""

    tokens: float
    since: float
    running: int = 0


@dataclass(slots=True)
class Quota:
    """Per key: max_concurrent requests at a time, tokens_per_minute on average. None: no limit.

    Tokens are booked when an answer has ended, so a key may overdraw by what it has running, and then waits.
    """

    max_concurrent: int | None
    tokens_per_minute: int | None
    clock: Callable[[], float]
    _accounts: dict[str, _Account] = field(default_factory=dict)

    def enter(self, key: str) -> None:
        """A request starts; ApiError 429 with Retry-After when the key has had its share."""
        account = self._account(key)
        if self.max_concurrent is not None and account.running >= self.max_concurrent:
            message = f"This key may run {self.max_concurrent} requests at a time"
            raise too_many(message, 1, "concurrency_limit")
        if self.tokens_per_minute is not None and account.tokens <= 0:
            message = f"This key may use {self.tokens_per_minute} tokens a minute"
            wait_s = -account.tokens * 60 / self.tokens_per_minute
            raise too_many(message, wait_s, "token_rate_limit")
        account.running += 1

    def leave(self, key: str, num_tokens: int) -> None:
        """A request has ended; prompt and output tokens are booked."""
        account = self._account(key)
        account.running -= 1
        account.tokens -= num_tokens

    def _account(self, key: str) -> _Account:
        now, most = self.clock(), float(self.tokens_per_minute or 0)
        account = self._accounts.setdefault(key, _Account(most, now))
        account.tokens = min(most, account.tokens + (now - account.since) * most / 60)
        account.since = now
        return account


@dataclass(slots=True)
class Pace:
    """How long a slot is held: a running mean of the seconds from admission to the end."""

    held_s: float | None = None

    def saw(self, timings: Timings) -> None:
        """A choice has ended."""
        if timings.admitted is None or timings.finished is None:
            return
        held = max(0.0, timings.finished - timings.admitted)
        self.held_s = held if self.held_s is None else EMA * self.held_s + (1 - EMA) * held

    def expected_wait_s(self, num_waiting: int, num_running: int) -> float:
        """Seconds until a new choice gets a slot: each running one is free every held_s (Little's law)."""
        if num_waiting == 0 or self.held_s is None:
            return 0.0
        return (num_waiting + 1) * self.held_s / max(1, num_running)


def too_many(message: str, wait_s: float, code: str) -> ApiError:
    """429 with Retry-After in whole seconds."""
    seconds = min(LONGEST_RETRY_S, max(1, math.ceil(wait_s)))
    return ApiError(429, message, code=code, headers={"retry-after": str(seconds)})

"""Trace numbers: 1, 2, 3, ... on a tape by itself; in a fleet by the clock: one order over all tapes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

EPOCH = 1_735_689_600
"""2025-01-01 in Unix seconds: what a fleet's numbers count milliseconds from."""
LANE_BITS = 21
"""Low bits that name the gateway; 42 bits of milliseconds above them last until 2164."""
FIRST = 1 << (LANE_BITS + 20)
"""The least number by the clock; no tape counts so far."""


class Numbers:
    """Rising numbers after `last`. With a gateway's name they are milliseconds and the hash of the name.

    So two gateways give the same number only where 21 bits of two names' hashes and the millisecond agree,
    and a page of a fleet's traces is in order of admission as far as the machines' clocks agree. Each
    gateway's own numbers rise whatever its clock does; more than 1,000 a second run ahead of it.
    """

    def __init__(self, last: int, gateway: str | None = None, clock: Callable[[], float] = time.time) -> None:
        self.gateway = gateway
        self._last = last
        self._lane = None if gateway is None else lane_of(gateway)
        self._clock = clock

    def next(self) -> int:
        """The next number."""
        if self._lane is None:
            self._last += 1
        else:
            now = int((self._clock() - EPOCH) * 1000)
            ms = max(now, (self._last >> LANE_BITS) + 1, FIRST >> LANE_BITS)
            self._last = ms << LANE_BITS | self._lane
        return self._last


def lane_of(gateway: str) -> int:
    """A gateway's low bits."""
    return int.from_bytes(hashlib.sha256(gateway.encode()).digest()[:4], "big") % (1 << LANE_BITS)

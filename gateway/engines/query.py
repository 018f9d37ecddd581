"""What is asked of an engine elsewhere, what it may answer with, and how it may fail."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.core import Sampling
from gateway.sampling import Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Score a draft: what does the model say after `prefix`, `prefix` + draft[:1], ..., and after all of it?

    prefix: at least one token id. position: output position of the first answer. deadline: of
    time.monotonic(), beyond which no answer is worth anything. affinity: calls that carry the same one
    should reach the same replica, which holds their prefix in its cache. headers: sent along (trace context).
    """

    prefix: tuple[int, ...]
    draft: tuple[int, ...]
    sampling: Sampling
    choice: int
    position: int
    num_topk: int
    deadline: float
    request_id: str
    affinity: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_positions(self) -> int:
        """Readings that are wanted: one at each drafted token and the next."""
        return len(self.draft) + 1

    def context(self, i: int) -> list[int]:
        """All tokens before the i-th position."""
        return [*self.prefix, *self.draft[:i]]

    def drafted(self, i: int) -> int | None:
        """The draft's token at the i-th position; none at the last."""
        return self.draft[i] if i < len(self.draft) else None

    def seed(self, i: int) -> int:
        """A seed of 31 bits for the i-th position alone.

        One seed for several positions would repeat its noise, and neighbouring tokens would not be
        independent; a seed by position makes the sample the same whatever was drafted before it.
        """
        counter = f"{self.sampling.seed}:{self.choice}:{self.position + i}".encode()
        return int.from_bytes(hashlib.blake2b(counter, digest_size=4).digest(), "little") >> 1


@dataclass(frozen=True, slots=True)
class Call:
    """One POST of a JSON body."""

    path: str
    body: dict[str, Any]


class Dialect(Protocol):
    """How one kind of server is asked, and how its answers are read. Pure: it sends nothing."""

    def calls(self, query: Query) -> list[Call]:
        """What to send for a query; the calls may run side by side."""
        ...

    def readings(self, query: Query, answers: list[Any]) -> list[Reading]:
        """One Reading a position from the calls' JSON, in their order; raises Malformed."""
        ...


class EngineFault(Exception):
    """A call that brought no usable answer. retry_after_s: what the server said of when to come back."""

    def __init__(self, why: str, retry_after_s: float | None = None) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


class Busy(EngineFault):
    """The engine is alive and asks for patience (429)."""


class Malformed(EngineFault):
    """An answer that is not what was asked for; a second try may bring a right one."""


class Refused(EngineFault):
    """The engine will not serve this request: trying again does not help."""


class Swapped(EngineFault):
    """The engine answers, but it is not the model that it was."""


class Unavailable(EngineFault):
    """The engine cannot be reached, or not in time, or is not the one it was; nobody tries any more."""

"""A tier as the engine drives it: jobs in, readings out. Where it runs is its own business."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from gateway.sampling import Ask, Reading


@dataclass(frozen=True, slots=True)
class Job:
    """One row's share of a pass: tokens to read, and what is asked about the last of them.

    sequence: prompt, output and waiting drafts; the row's own list, so whoever keeps it past the call copies
    it. start, end: the tier has read sequence[:start] before and reads sequence[start:end] now.
    asks: one for each of the last len(asks) tokens read, in order: what the tier says behind that token.
    A chunk of a long prompt may ask nothing. blocks: the row's KV blocks, for a tier that keeps them here.
    request_id, choice: whose row it is; a tier elsewhere may send all passes of a request to one replica.
    """

    request_id: str
    choice: int
    sequence: Sequence[int]
    start: int
    end: int
    asks: Sequence[Ask]
    blocks: tuple[int, ...]

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens that the tier has not read before."""
        return self.sequence[self.start : self.end]

    @property
    def prefix(self) -> Sequence[int]:
        """All tokens up to and including the one behind which the first ask stands."""
        return self.sequence[: self.end - max(0, len(self.asks) - 1)]

    @property
    def draft(self) -> Sequence[int]:
        """The tokens after `prefix`: asks[i] is about draft[i], the last ask about the token to come."""
        return self.sequence[self.end - max(0, len(self.asks) - 1) : self.end]


class Scored(NamedTuple):
    """readings: for each job, in order, one for each of its asks. ms: wall time of the model's own pass,
    its logits' reading included, without what was done around it (drawing tokens, waiting for a turn)."""

    readings: list[list[Reading]]
    ms: float


class Scorer(Protocol):
    """What serves one tier.

    vocab_size: token ids from 0 up that it knows; a token of a job is below every tier's, and so is a token
    of a reading.
    """

    @property
    def vocab_size(self) -> int: ...

    def score(self, jobs: Sequence[Job]) -> Scored:
        """Read every job's tokens in one pass; what it raises ends the rows of these jobs and no others."""
        ...

    def copy_prefix(self, source: tuple[int, ...], target: tuple[int, ...], length: int) -> None:
        """The first `length` positions of the row in blocks `target` are those of the row in `source`.

        A tier that keeps no blocks here does nothing.
        """
        ...


class Heard(NamedTuple):
    """What a tier elsewhere said of one job, a reading an ask; ms: from asking to hearing, tries included."""

    readings: list[Reading]
    ms: float


class LargeFailed(Exception):
    """A tier elsewhere gave no answer. retry_after_s: when trying again may help; None: it will not."""

    def __init__(self, why: str, retry_after_s: float | None) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


class Distant(Protocol):
    """What serves a tier that runs elsewhere: every row's job goes out on its own and comes back later.

    It keeps whatever it has read where it runs; so a job may start anywhere.
    """

    @property
    def vocab_size(self) -> int: ...

    def send(self, job: Job, age_s: float, headers: Mapping[str, str]) -> Future[Heard]:
        """Ask; the job must have asks. age_s: how long its request has been with us. headers: its trace
        context. Fails with LargeFailed. Cancelling the Future drops the call."""
        ...

    @property
    def available(self) -> bool:
        """Whether calls go out."""
        ...

    @property
    def outcomes(self) -> dict[str, int]:
        """Tries of calls so far, by how they ended."""
        ...

    def close(self) -> None:
        """Drop all calls; nothing is sent any more."""
        ...

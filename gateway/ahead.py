"""A small tier that drafts ahead of the policy: k tokens in one go, handed out one at a time.

On a GPU the host must not stand between two tokens of a draft. So a pass also feeds the likeliest token, and
the likeliest behind that, and copies what was read at all of them at once. The engine asks token by token as
ever, its one policy decides on the host, and as long as it keeps what was drafted the answers are already
here. When it defers, or anything else comes next, the rest is forgotten: a rolled-back cache is a lower
length, as always.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from gateway.layout import Feed
from gateway.local import Local, Model, feeds_of
from gateway.sampling import Reading, look, read
from gateway.static_decoder import Drafts
from gateway.tier import Job, Scored

STEPS = 4
"""Tokens of a draft: the policy keeps about three of four, so that more would mostly be thrown away."""


class Drafter(Model, Protocol):
    """A model that can also feed its own likeliest tokens."""

    def draft(self, feeds: Sequence[Feed], steps: int, vocab_size: int) -> Drafts | None: ...


@dataclass(slots=True)
class Drafted:
    """What was read ahead for one row: tokens[0] was fed behind sequence[:end] and said readings[0], ..."""

    request_id: str
    choice: int
    end: int
    tokens: list[int]
    readings: list[Reading]


class Ahead:
    """A model as a tier, as Local, with drafts ahead for greedy rows whose logits nothing reshapes.

    A pass that is answered from what was drafted takes 0 ms; the one that drafted took the time of all.
    """

    def __init__(self, model: Drafter, vocab_size: int, steps: int = STEPS) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.steps = steps
        self.local = Local(model, vocab_size)
        # By a row's first block: a row that is gone gives way to the next in its place.
        self.drafted: dict[int, Drafted] = {}

    def score(self, jobs: Sequence[Job]) -> Scored:
        """Answer what was drafted from memory; read the rest in one pass, and draft ahead if all may."""
        known = [self._recall(job) for job in jobs]
        rest = [job for job, reading in zip(jobs, known, strict=True) if reading is None]
        fresh, ms = self._read(rest) if rest else ([], 0.0)
        answers = iter(fresh)
        return Scored([next(answers) if reading is None else [reading] for reading in known], ms)

    def copy_prefix(self, source: tuple[int, ...], target: tuple[int, ...], length: int) -> None:
        """Copy keys and values from one row's blocks to another's."""
        self.local.copy_prefix(source, target, length)

    def _recall(self, job: Job) -> Reading | None:
        """What was drafted for exactly this job, which then is no longer remembered."""
        ahead = self.drafted.pop(job.blocks[0], None)
        if ahead is None or len(job.asks) != 1 or not _plain(job):
            return None
        same = (ahead.request_id, ahead.choice) == (job.request_id, job.choice)
        if not same or (job.start, job.end) != (ahead.end, ahead.end + 1) or job.tokens[0] != ahead.tokens[0]:
            return None
        if len(ahead.tokens) > 1:
            later = replace(ahead, end=job.end, tokens=ahead.tokens[1:], readings=ahead.readings[1:])
            self.drafted[job.blocks[0]] = later
        return ahead.readings[0]

    def _read(self, jobs: Sequence[Job]) -> Scored:
        if not all(map(_plain, jobs)):
            return self.local.score(jobs)
        feeds = feeds_of(jobs)
        asks = [ask for job in jobs for ask in job.asks] + [job.asks[-1] for job in jobs] * self.steps
        began = time.perf_counter()
        drafts = self.model.draft(feeds, self.steps, self.vocab_size)
        if drafts is None:
            return self.local.score(jobs)
        said, fed = drafts
        logits = said.logits[:, : self.vocab_size]
        numbers = look(logits, asks, said.attn_entropy, summarize=self.model.summarize)
        ms = (time.perf_counter() - began) * 1e3
        flat = iter(read(logits, asks, numbers))
        readings = [[next(flat) for _ in job.asks] for job in jobs]
        behind = list(flat)
        for row, (job, tokens) in enumerate(zip(jobs, fed.T.tolist(), strict=True)):
            self.drafted[job.blocks[0]] = Drafted(
                job.request_id, job.choice, job.end, tokens, behind[row :: len(jobs)]
            )
        return Scored(readings, ms)


def _plain(job: Job) -> bool:
    """Whether what comes next is asked for, and all answers are greedy and of the logits as they are."""
    return bool(job.asks) and all(
        ask.plain and not ask.hidden and ask.sampling.temperature == 0 for ask in job.asks
    )

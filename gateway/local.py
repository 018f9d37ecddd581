"""A model in this process as a tier: one forward, whose logits are read as the asks say."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from gateway.core import Tier
from gateway.layout import Feed, Forward
from gateway.sampling import look, read
from gateway.summary import Summarize
from gateway.tier import Job, Scored


class Model(Protocol):
    """What a local tier needs of a model; gateway.models.CausalLM, and fakes in tests."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def summarize(self) -> Summarize: ...

    def forward(self, feeds: list[Feed]) -> Forward: ...

    def copy_prefix(self, source: tuple[int, ...], target: tuple[int, ...], length: int) -> None: ...


class Local:
    """One model as a tier. vocab_size: ids beyond it are cut off its logits."""

    def __init__(self, model: Model, vocab_size: int) -> None:
        self.model = model
        self.vocab_size = vocab_size

    def score(self, jobs: Sequence[Job]) -> Scored:
        """One forward over all jobs; ms is the forward's, until its numbers are on the host."""
        feeds = feeds_of(jobs)
        asks = [ask for job in jobs for ask in job.asks]
        began = time.perf_counter()
        logits, attn_entropy, hidden = self.model.forward(feeds)
        logits = logits[:, : self.vocab_size]
        numbers = look(logits, asks, attn_entropy, hidden, self.model.summarize)
        ms = (time.perf_counter() - began) * 1e3
        flat = iter(read(logits, asks, numbers))
        return Scored([[next(flat) for _ in job.asks] for job in jobs], ms)

    def copy_prefix(self, source: tuple[int, ...], target: tuple[int, ...], length: int) -> None:
        """Copy keys and values from one row's blocks to another's."""
        self.model.copy_prefix(source, target, length)


def feeds_of(jobs: Sequence[Job]) -> list[Feed]:
    """The jobs as a model of this process is fed them."""
    return [Feed(job.blocks, job.start, job.tokens, len(job.asks)) for job in jobs]


def local_tiers(models: Mapping[Tier, Model]) -> dict[Tier, Local]:
    """Models of one family as tiers that know the same tokens.

    Padded heads differ in size within one family; ids beyond the shortest stand for no token.
    """
    vocab_size = min(model.vocab_size for model in models.values())
    return {tier: Local(model, vocab_size) for tier, model in models.items()}

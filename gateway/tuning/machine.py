"""A pair of models loaded for measuring: one engine, nothing else on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gateway.config import Config
from gateway.core import Tier
from gateway.load import CostTable
from gateway.loading import check_pair, load_pair
from gateway.prefix import PrefixCache
from gateway.request import Served
from gateway.scheduler import Scheduler
from gateway.text import Tokenizer
from gateway.tuning.run import Runner

KEPT_ROWS = 512
"""Finished rows whose keys and values are kept: the same prompts run again under the next policy."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What runs prompts, what it is made of, and what its passes cost."""

    runner: Runner
    served: Served
    tokenizer: Tokenizer
    costs: dict[Tier, CostTable]


@contextmanager
def runner_for(
    config: Config, rows: int, max_tokens: int, *, ride_along: bool | None = None
) -> Iterator[Machine]:
    """Load the config's pair; it is let go at the end. ride_along: instead of the config's. Raises
    ConfigError."""
    check_pair(config)
    loaded = load_pair(config, timed=True)
    assert loaded.costs is not None
    engine = loaded.engine(
        Scheduler(config.engine.large_wait_ms / 1000, config.engine.prefill_chunk),
        rows,
        config.engine.max_model_len,
        prefixes=PrefixCache(KEPT_ROWS),
        ride_along=config.engine.ride_along if ride_along is None else ride_along,
    )
    yield Machine(Runner(engine, max_tokens), loaded.served, loaded.tokenizer, loaded.costs)

"""The `tiny` preset, loaded, and engines over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Any

from gateway import tiny
from gateway.cache import BlockPool
from gateway.core import MIDDLES, Tier
from gateway.engine import Engine
from gateway.local import local_tiers
from gateway.models import CausalLM
from gateway.scheduler import Scheduler
from gateway.text import Tokenizer

NUM_BLOCKS, BLOCK_SIZE = 40, 256


@dataclass(frozen=True)
class TinyPair:
    """folder holds `small` and `large`; both models have NUM_BLOCKS blocks of BLOCK_SIZE positions."""

    folder: Path
    tokenizer: Tokenizer
    small: CausalLM
    large: CausalLM

    @classmethod
    def build(cls, cache: Path) -> TinyPair:
        folder = tiny.build(cache)
        small, large = load(folder / "small"), load(folder / "large")
        return cls(folder, Tokenizer.load(folder / "large"), small, large)

    def engine(
        self,
        *,
        num_blocks: int = NUM_BLOCKS,
        max_rows: int = NUM_BLOCKS,
        max_model_len: int = BLOCK_SIZE,
        large_wait_s: float = 0.0,
        prefill_chunk: int = 512,
        clock: Callable[[], float] = time,
        middles: Sequence[CausalLM] = (),
        **options: Any,
    ) -> Engine:
        """A fresh engine over the shared models, and others between; max_model_len at most BLOCK_SIZE."""
        between = dict(zip(MIDDLES, middles, strict=False))
        return Engine(
            local_tiers({Tier.SMALL: self.small, **between, Tier.LARGE: self.large}),
            self.tokenizer,
            BlockPool(num_blocks, BLOCK_SIZE),
            Scheduler(large_wait_s, prefill_chunk),
            max_rows=max_rows,
            max_model_len=max_model_len,
            clock=clock,
            **options,
        )


def load(folder: Path) -> CausalLM:
    """A model with NUM_BLOCKS blocks of BLOCK_SIZE positions."""
    model = CausalLM.load(folder)
    model.allocate(NUM_BLOCKS, BLOCK_SIZE)
    return model

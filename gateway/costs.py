"""What a pass of each tier costs on this machine, measured at the first start and kept in the cache."""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import structlog
import torch

from gateway.core import Tier
from gateway.layout import Feed, Forward
from gateway.load import CostTable

log = structlog.get_logger("gateway")

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Pass sizes in tokens that are timed."""


class Model(Protocol):
    """What is timed."""

    def forward(self, feeds: list[Feed]) -> Forward: ...


def costs_of(
    models: Mapping[Tier, Model], blocks: tuple[int, ...], most: int, identity: str, cache: Path
) -> dict[Tier, CostTable]:
    """The cost tables of all tiers; identity names its weights and numerics, cache is where they are kept.

    blocks: a row's KV blocks, which hold `most` positions; their contents are overwritten.
    """
    sizes = [size for size in SIZES if size <= most]
    machine = f"{platform.machine()} {_processor()} {torch.get_num_threads()} threads"
    key = hashlib.sha256(f"{identity} {machine} {sizes}".encode()).hexdigest()[:16]
    path = cache / "costs" / f"{key}.json"
    tables = _read(path)
    if tables is None:
        tables = measure(lambda tier, num: _timed(models[tier], blocks, num), sizes, tuple(models))
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_suffix(".half")
        half.write_text(json.dumps({tier: [t.tokens, t.ms] for tier, t in tables.items()}))
        half.rename(path)
    for tier, table in tables.items():
        log.info("pass_costs", tier=tier, ms={n: round(table(n), 1) for n in table.tokens}, file=str(path))
    return tables


def measure(
    run: Callable[[Tier, int], float],
    sizes: Sequence[int],
    tiers: Sequence[Tier] = (Tier.SMALL, Tier.LARGE),
) -> dict[Tier, CostTable]:
    """Cost tables from timed passes: run(tier, tokens) -> ms; never falling with size.

    The least of six: whatever disturbs a pass makes it longer. All sizes take turns, so that what disturbs
    for a second does not spoil every try of one. A pass cannot cost more than a larger one, so a size that
    was disturbed every time takes the figure of the next.
    """
    tables = {}
    for tier in tiers:
        rounds = [[run(tier, size) for size in sizes] for _ in range(6)]
        ms = [min(tried) for tried in zip(*rounds, strict=True)]
        for i in range(len(ms) - 2, -1, -1):
            ms[i] = min(ms[i], ms[i + 1])
        tables[tier] = CostTable(tuple(sizes), tuple(ms))
    return tables


def _timed(model: Model, blocks: tuple[int, ...], num_tokens: int) -> float:
    began = time.perf_counter()
    out = model.forward([Feed(blocks, 0, [0] * num_tokens, num_tokens)])
    # Reading one number back waits for a GPU to be done.
    out.logits[-1, 0].item()
    return (time.perf_counter() - began) * 1e3


def _read(path: Path) -> dict[Tier, CostTable] | None:
    try:
        found = json.loads(path.read_text())
        return {Tier(tier): CostTable(tuple(tokens), tuple(ms)) for tier, (tokens, ms) in found.items()}
    except (OSError, ValueError):
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")

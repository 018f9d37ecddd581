"""From a pair of model folders to a running worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TypedDict, Unpack

import structlog
import torch

from gateway import kernels, presets
from gateway.cache import BlockPool, num_blocks_for
from gateway.config import Config, ConfigError
from gateway.core import Tier
from gateway.costs import SIZES, costs_of
from gateway.engine import Engine
from gateway.load import CostTable, Load
from gateway.local import local_tiers
from gateway.lookup import AnswerStore
from gateway.models import CausalLM, Quantize
from gateway.prefix import PrefixCache
from gateway.request import Served
from gateway.scheduler import Scheduler
from gateway.store import cache_dir, model_hash
from gateway.text import Tokenizer
from gateway.worker import Observer, Worker

log = structlog.get_logger("gateway")

PAGE = 256
"""Positions in a KV block where rows are paged; else a block is a whole slot, read without a copy."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A pair in memory with its KV caches: what engines are made from, one at a time."""

    small: CausalLM
    large: CausalLM
    tokenizer: Tokenizer
    num_blocks: int
    block_size: int
    served: Served
    costs: dict[Tier, CostTable] | None

    def engine(
        self, scheduler: Scheduler, max_rows: int, max_model_len: int, **options: Unpack[EngineOptions]
    ) -> Engine:
        """An engine over this pair; options as for Engine."""
        pool = BlockPool(self.num_blocks, self.block_size)
        return Engine(
            local_tiers({Tier.SMALL: self.small, Tier.LARGE: self.large}),
            self.tokenizer,
            pool,
            scheduler,
            max_rows=max_rows,
            max_model_len=max_model_len,
            **options,
        )


class EngineOptions(TypedDict, total=False):
    """Engine's optional parts."""

    load: Load | None
    answers: AnswerStore | None
    prefixes: PrefixCache | None


def load_worker(config: Config, observers: Sequence[Observer]) -> Worker:
    """The pair that the config names, fetched and converted where it is missing, behind a running worker."""
    loaded = load_pair(config, timed=_adapts(config))
    check_calibrated(config, loaded.served)
    engine = config.engine
    worker = Worker(
        loaded.engine(
            Scheduler(engine.large_wait_ms / 1000, engine.prefill_chunk),
            engine.max_rows,
            engine.max_model_len,
            load=None if loaded.costs is None else Load(loaded.costs),
            answers=_answers(config, loaded.tokenizer),
            prefixes=PrefixCache(engine.prefix_slots),
        ),
        loaded.served,
        observers,
        max_queue=engine.max_queue,
    )
    worker.start()
    return worker


def load_pair(config: Config, *, timed: bool) -> Loaded:
    """Load both models, make their caches, time passes if `timed`; raises ConfigError naming the key."""
    device = config.models.device
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("models.device: there is no CUDA device")
    pair = presets.resolve(config.models)
    dtype = config.models.dtype or ("float32" if pair.name == "tiny" else "bfloat16")
    quantize = _quantization(config, dtype)
    small, large = (
        CausalLM.load(folder, device=device, dtype=getattr(torch, dtype), quantize=quantize[tier])
        for tier, folder in ((Tier.SMALL, pair.small), (Tier.LARGE, pair.large))
    )
    engine = config.engine
    paged = device == "cuda" or set(quantize.values()) == {"int8"}
    block_size = min(PAGE, engine.max_model_len) if paged else engine.max_model_len
    try:
        num_blocks = num_blocks_for(
            int(engine.kv_memory_gib * 2**30),
            block_size,
            [small.cache_shape, large.cache_shape],
            most=engine.max_rows * -(-engine.max_model_len // block_size),
        )
    except MemoryError as error:
        raise ConfigError(str(error)) from None
    for model in (small, large):
        model.allocate(num_blocks, block_size)
    served = Served(
        small_model=_name(config, pair.small),
        large_model=_name(config, pair.large),
        small_hash=model_hash(pair.small),
        large_hash=model_hash(pair.large),
        numerics=f"{device}/{dtype}/{quantize[Tier.SMALL]}+{quantize[Tier.LARGE]}",
        version=version("tokentape"),
        router_hash=_router_hash(config),
    )
    costs = None
    if timed:
        identity = f"{served.small_hash} {served.large_hash} {served.numerics}"
        most = min(SIZES[-1], engine.max_model_len, num_blocks * block_size)
        blocks = tuple(range(-(-most // block_size)))
        costs = costs_of({Tier.SMALL: small, Tier.LARGE: large}, blocks, most, identity, cache_dir())
    return Loaded(small, large, Tokenizer.load(pair.large), num_blocks, block_size, served, costs)


def check_calibrated(config: Config, served: Served) -> None:
    """Raise ConfigError where a policy was calibrated on other models than those served."""
    for name, calibration in config.calibration.items():
        for key in ("small_hash", "large_hash"):
            was, now = getattr(calibration, key), getattr(served, key)
            if was != now:
                raise ConfigError(
                    f"calibration.{name}.{key}: policy {name} was calibrated on other models "
                    f"({was[:12]}, served is {now[:12]}); calibrate again, or delete [calibration.{name}]"
                )
        policy_hash = config.policies[name].hash
        if calibration.policy_hash != policy_hash or calibration.numerics != served.numerics:
            # Still a policy one may serve, but no longer the one that was tested.
            log.warning(
                "guarantee_void",
                policy=name,
                calibrated={"policy_hash": calibration.policy_hash, "numerics": calibration.numerics},
                served={"policy_hash": policy_hash, "numerics": served.numerics},
            )


def _router_hash(config: Config) -> str | None:
    router = config.policies["stable"].router
    return None if router is None else router.hash


def _is_tiny(config: Config) -> bool:
    return config.models.preset == "tiny"


def _adapts(config: Config) -> bool:
    adapt = config.engine.adapt
    return not _is_tiny(config) if adapt is None else adapt


def _quantization(config: Config, dtype: str) -> dict[Tier, Quantize]:
    """int8 where it was asked for, or by default on a CPU that can run it; raises ConfigError."""
    models = config.models
    by_default = models.device == "cpu" and dtype == "bfloat16" and not _is_tiny(config)
    chosen: dict[Tier, Quantize] = {}
    for tier, asked in ((Tier.SMALL, models.small_quantize), (Tier.LARGE, models.large_quantize)):
        wanted = by_default if asked is None else asked == "int8"
        able = wanted and models.device == "cpu" and kernels.available()
        if asked == "int8" and not able:
            raise ConfigError(f"models.{tier}_quantize: int8 needs a CPU and a C++ compiler at first start")
        chosen[tier] = "int8" if able else "none"
    log.info("quantization", small=chosen[Tier.SMALL], large=chosen[Tier.LARGE])
    return chosen


def _answers(config: Config, tokenizer: Tokenizer) -> AnswerStore | None:
    """Earlier answers and the corpus to look tokens up in; None where neither is wanted."""
    engine = config.engine
    if not engine.lookup_history_tokens and engine.lookup_corpus is None:
        return None
    corpus: list[int] = []
    if engine.lookup_corpus is not None:
        try:
            text = Path(engine.lookup_corpus).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"engine.lookup_corpus: {error}") from None
        corpus = tokenizer.encode(text, add_special_tokens=False)
    return AnswerStore(engine.lookup_history_tokens, corpus)


def _name(config: Config, folder: Path) -> str:
    """The model's name for the tape: its own folder's, which says more than a cache path."""
    return f"{config.models.preset}/{folder.name}" if config.models.preset else folder.name

"""From a pair of model folders to a running worker."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import structlog
import torch

from gateway import kernels, presets
from gateway.cache import BlockPool, num_blocks_for
from gateway.config import Config, ConfigError
from gateway.core import Tier
from gateway.costs import SIZES, costs_of
from gateway.engine import Engine
from gateway.load import Load
from gateway.lookup import AnswerStore
from gateway.models import CausalLM, Quantize
from gateway.prefix import PrefixCache
from gateway.request import Served
from gateway.scheduler import Scheduler
from gateway.store import cache_dir, model_hash
from gateway.text import Tokenizer
from gateway.worker import Observer, Worker

log = structlog.get_logger("gateway")

GPU_BLOCK_SIZE = 64
"""Positions in a KV page on a GPU; on a CPU a block is a whole slot."""


def load_pair(config: Config, observers: Sequence[Observer]) -> Worker:
    """The pair that the config names, fetched and converted where it is missing."""
    pair = presets.resolve(config.models)
    dtype = config.models.dtype or ("float32" if pair.name == "tiny" else "bfloat16")
    return load_worker(config, pair.small, pair.large, dtype, observers)


def load_worker(
    config: Config, small: Path, large: Path, dtype: str, observers: Sequence[Observer]
) -> Worker:
    """Load both models of a pair and start the engine's thread; raises ConfigError naming the key."""
    engine = config.engine
    device = config.models.device
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("models.device: there is no CUDA device")
    tokenizer = Tokenizer.load(large)
    quantize = _quantization(config, dtype)
    models = [
        CausalLM.load(folder, device=device, dtype=getattr(torch, dtype), quantize=quantize[tier])
        for tier, folder in ((Tier.SMALL, small), (Tier.LARGE, large))
    ]
    block_size = engine.max_model_len if device == "cpu" else GPU_BLOCK_SIZE
    try:
        num_blocks = num_blocks_for(
            int(engine.kv_memory_gib * 2**30),
            block_size,
            [model.cache_shape for model in models],
            most=engine.max_rows * -(-engine.max_model_len // block_size),
        )
    except MemoryError as error:
        raise ConfigError(str(error)) from None
    for model in models:
        model.allocate(num_blocks, block_size)
    served = Served(
        small_model=_name(config, small),
        large_model=_name(config, large),
        small_hash=model_hash(small),
        large_hash=model_hash(large),
        numerics=f"{device}/{dtype}/{quantize[Tier.SMALL]}+{quantize[Tier.LARGE]}",
        version=version("tokentape"),
    )
    load = None
    if _adapts(config):
        pair = {Tier.SMALL: models[0], Tier.LARGE: models[1]}
        identity = f"{served.small_hash} {served.large_hash} {served.numerics}"
        most = min(SIZES[-1], engine.max_model_len)
        blocks = tuple(range(-(-most // block_size)))
        load = Load(costs_of(pair, blocks, most, identity, cache_dir()))
    worker = Worker(
        Engine(
            models[0],
            models[1],
            tokenizer,
            BlockPool(num_blocks, block_size),
            Scheduler(engine.large_wait_ms / 1000, engine.prefill_chunk),
            max_rows=engine.max_rows,
            max_model_len=engine.max_model_len,
            load=load,
            answers=_answers(config, tokenizer),
            prefixes=PrefixCache(
                min(engine.prefix_slots, num_blocks - 1) if device == "cpu" else engine.prefix_slots
            ),
        ),
        served,
        observers,
        max_queue=engine.max_queue,
    )
    worker.start()
    return worker


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

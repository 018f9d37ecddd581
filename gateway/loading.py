"""From a pair of model folders to a running worker."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from gateway import presets
from gateway.cache import BlockPool, num_blocks_for
from gateway.config import Config, ConfigError
from gateway.engine import Engine
from gateway.models import CausalLM
from gateway.request import Served
from gateway.scheduler import Scheduler
from gateway.text import Tokenizer
from gateway.worker import Observer, Worker

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
    tokenizer, other = Tokenizer.load(large), Tokenizer.load(small)
    if tokenizer.fingerprint != other.fingerprint:
        raise ConfigError("models.small: its tokenizer differs from the large model's")
    number = getattr(torch, dtype)
    models = [CausalLM.load(folder, device=device, dtype=number) for folder in (small, large)]
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
    worker = Worker(
        Engine(
            models[0],
            models[1],
            tokenizer,
            BlockPool(num_blocks, block_size),
            Scheduler(engine.large_wait_ms / 1000, engine.prefill_chunk),
            max_rows=engine.max_rows,
            max_model_len=engine.max_model_len,
        ),
        Served(
            small_model=_name(config, small),
            large_model=_name(config, large),
            small_hash=_weights_hash(small),
            large_hash=_weights_hash(large),
            numerics=f"{device}/{dtype}/none",
            version=version("tokentape"),
        ),
        observers,
        max_queue=engine.max_queue,
    )
    worker.start()
    return worker


def _name(config: Config, folder: Path) -> str:
    """The model's name for the tape: its own folder's, which says more than a cache path."""
    return f"{config.models.preset}/{folder.name}" if config.models.preset else folder.name


def _weights_hash(folder: Path) -> str:
    """16 hex digits over the weight files' contents."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]

"""How near a pass is to its floor: at few rows no pass is faster than reading the weights once."""

from __future__ import annotations

import time
from dataclasses import fields

import torch

from gateway.load import CostTable
from gateway.models import CausalLM
from gateway.torch_decoder import TorchDecoder

STREAM_BYTES = 2**29
"""Large against any processor's caches."""


def weight_bytes(decoder: TorchDecoder) -> int:
    """What a pass reads: every layer's weights and the output head."""
    tensors = [getattr(layer, f.name) for layer in decoder.layers for f in fields(layer)]
    return sum(t.nbytes for t in (*tensors, decoder.norm, decoder.head) if t is not None)


def bandwidth(device: torch.device) -> float:
    """Bytes a second of a copy, read and written: the best of five."""
    source = torch.ones(STREAM_BYTES // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        target[-1].item()  # whatever ran before is done
        began = time.perf_counter()
        target.copy_(source)
        target[-1].item()
        best = min(best, time.perf_counter() - began)
    return 2 * STREAM_BYTES / best


def line(name: str, model: CausalLM, costs: CostTable) -> str | None:
    """A pass of one token over its floor; None for decoders that keep their weights packed."""
    if not isinstance(model.decoder, TorchDecoder):
        return None
    read, speed = weight_bytes(model.decoder), bandwidth(model.decoder.device)
    ms, floor = costs(1), read / speed * 1e3
    return (
        f"{name}: a pass of one token {ms:.2f} ms, {ms / floor:.2f} times its floor of {floor:.2f} ms "
        f"({read / 1e9:.2f} GB of weights at {speed / 1e9:.0f} GB/s)"
    )

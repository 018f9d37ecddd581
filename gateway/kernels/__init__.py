"""CPU kernels: linear layers of 8 and 4 bits, attention over the slot cache, and a whole decoder forward.

Compiled once at first use with the machine's compiler (build.py); `available()` says whether they can be
used.
The fastest of four paths (amx, vnni, avx2, portable) is chosen by the processor; all give the same bits.
"""

from __future__ import annotations

import torch

from gateway.kernels.build import load
from gateway.kernels.decoder import Decoder, DecoderShape, LayerWeights, attention
from gateway.kernels.linear import Bits, Packed, dequantize_weight, int8_linear, quantize_weight

__all__ = [
    "Bits",
    "Decoder",
    "DecoderShape",
    "LayerWeights",
    "Packed",
    "attention",
    "available",
    "build_name",
    "dequantize_weight",
    "int8_linear",
    "paths",
    "quantize_weight",
    "use_path",
]


def available() -> bool:
    """Whether the kernels are built and loaded, compiling them on the first call (15-30 s, cached)."""
    return bool(load())


def build_name() -> str:
    """Names the kernels' sources, compiler and flags; empty where they cannot be used."""
    return load()


def paths() -> list[str]:
    """The kernel paths this processor has, fastest first. Call `available()` before."""
    names: list[str] = torch.ops.tokentape.paths()
    return names


def use_path(name: str) -> None:
    """Makes later calls take one of `paths()`; for tests and benchmarks. Raises RuntimeError for others."""
    torch.ops.tokentape.use_path(name)

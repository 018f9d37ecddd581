"""Linear layers on integers: weights of 8 or 4 bits in groups of 128, activations made int8 on the fly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_NONE = torch.empty(0)

Bits = Literal[8, 4]


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [n, k] in the kernels' layout.

    weight: of 8 bits uint8 [n' / 16, k' / 4, 64] holding w + 128, of 4 bits uint8 [n' / 16, k' / 8, 64], each
    byte the codes of two of the kernels' int8 levels; scale: bfloat16 [n' / 16, k' / 128, 16]; n' is n padded
    to 64, k' is k padded to 128.
    """

    weight: Tensor
    scale: Tensor
    n: int
    k: int

    @property
    def bits(self) -> int:
        """Bits of one weight: 8 or 4."""
        return self.weight.shape[1] * 32 // (self.scale.shape[1] * 128)

    @property
    def num_bytes(self) -> int:
        """Bytes that one pass reads."""
        return self.weight.numel() + 2 * self.scale.numel()


def quantize_weight(weight: Tensor, bits: Bits = 8) -> Packed:
    """Quantizes a float32 or bfloat16 weight [n, k], per output and group of 128 inputs.

    8 bits: 127 even steps a side of zero. 4 bits: sixteen uneven levels, the scale the best of a few.
    """
    packed, scale = torch.ops.tokentape.quantize_weight(weight.detach().contiguous(), bits)
    return Packed(packed, scale, weight.shape[0], weight.shape[1])


def dequantize_weight(packed: Packed) -> Tensor:
    """The float32 weight [n, k] that a packed one stands for."""
    weight = packed.weight
    if packed.bits == 4:
        codes = torch.stack((weight & 15, weight >> 4), 2).flatten(1, 2)
        weight = torch.tensor(torch.ops.tokentape.levels(), dtype=torch.int16)[codes.int()] + 128
    blocks, quads, _ = weight.shape
    values = weight.view(blocks, quads, 16, 4).permute(0, 2, 1, 3).reshape(blocks, 16, -1, 128)
    scaled = (values.float() - 128) * packed.scale.float().transpose(1, 2).unsqueeze(-1)
    return scaled.reshape(blocks * 16, -1)[: packed.n, : packed.k].contiguous()


def int8_linear(x: Tensor, packed: Packed, bias: Tensor | None = None) -> Tensor:
    """x [..., k] times the weight, plus bias [n]: float32 [..., n]. A row's bits do not depend on the others.

    Raises RuntimeError when shapes do not match or k is not a multiple of 16.
    """
    rows = x.reshape(-1, packed.k).float().contiguous()
    out: Tensor = torch.ops.tokentape.int8_linear(
        rows, packed.weight, packed.scale, _NONE if bias is None else bias.float(), packed.n
    )
    return out.view(*x.shape[:-1], packed.n)

"""int8 linear layers: weights in groups of 128, activations quantized per row and group on the fly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_NONE = torch.empty(0)


@dataclass(frozen=True, slots=True)
class Packed:
    """An int8 weight [n, k] in the kernels' layout.

    weight: uint8 [n' / 16, k' / 4, 64] holding w + 128; scale: bfloat16 [n' / 16, k' / 128, 16]; n' is n
    padded to 64, k' is k padded to 128.
    """

    weight: Tensor
    scale: Tensor
    n: int
    k: int

    @property
    def num_bytes(self) -> int:
        """Bytes that one pass reads."""
        return self.weight.numel() + 2 * self.scale.numel()


def quantize_weight(weight: Tensor) -> Packed:
    """Quantizes a float32 or bfloat16 weight [n, k], symmetric per output and group of 128 inputs."""
    packed, scale = torch.ops.tokentape.quantize_weight(weight.detach().contiguous())
    return Packed(packed, scale, weight.shape[0], weight.shape[1])


def dequantize_weight(packed: Packed) -> Tensor:
    """The float32 weight [n, k] that a packed one stands for."""
    blocks, quads, _ = packed.weight.shape
    values = packed.weight.view(blocks, quads, 16, 4).permute(0, 2, 1, 3).reshape(blocks, 16, -1, 128)
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

"""A whole decoder forward in one operator: packed weights, flat tokens of several rows, a paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gateway.kernels.linear import Packed

_NONE = torch.empty(0)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Norms are float32 [hidden] (q_norm, k_norm: [head_dim], Qwen3 only).

    qkv: [(heads + 2 * kv_heads) * head_dim, hidden], q then k then v; gate_up: [2 * intermediate, hidden],
    gate then up. Gemma's norms must already be 1 + w.
    """

    input_norm: Tensor
    post_norm: Tensor
    qkv: Packed
    o: Packed
    gate_up: Packed
    down: Packed
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What the kernels must know besides weights. activation: `silu` or `gelu_tanh`.

    attention_scale multiplies q k^T (usually head_dim ** -0.5); embed_scale multiplies embeddings (Gemma:
    hidden ** 0.5, else 1).
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    attention_scale: float
    activation: str = "silu"
    embed_scale: float = 1.0

    @property
    def supported(self) -> bool:
        """Whether the kernels can run this shape (all widths multiples of 16, heads of at most 256)."""
        widths = (self.hidden, self.intermediate, self.head_dim)
        fits = all(width % 16 == 0 for width in widths) and self.head_dim <= 256
        return fits and self.heads % self.kv_heads == 0 and self.activation in ("silu", "gelu_tanh")


class Decoder:
    """A model whose forward pass is one call. Calls on one decoder run one at a time.

    embed: [vocab, hidden] float32 or bfloat16; cos, sin: float32 [max_positions, rope_dim / 2] (the first
    half of the usual table; the halves of a head are paired as in transformers); head: [vocab, hidden].
    Raises ValueError for shapes the kernels cannot run and RuntimeError for tensors that do not fit them.
    """

    def __init__(
        self,
        shape: DecoderShape,
        *,
        embed: Tensor,
        cos: Tensor,
        sin: Tensor,
        final_norm: Tensor,
        head: Packed,
        layers: list[LayerWeights],
    ) -> None:
        if not shape.supported:
            raise ValueError(f"the kernels cannot run {shape}")
        sizes = [shape.hidden, shape.intermediate, shape.heads, shape.kv_heads, shape.head_dim]
        sizes.append(("silu", "gelu_tanh").index(shape.activation))
        numbers = [shape.norm_eps, shape.attention_scale, shape.embed_scale]
        shared = [embed, cos, sin, final_norm, head.weight, head.scale]
        flat = [tensor for layer in layers for tensor in _flatten(layer)]
        self._decoder = torch.classes.tokentape.Decoder(sizes, numbers, shared, flat)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        rows: Tensor,
        block_table: Tensor,
        k_cache: list[Tensor],
        v_cache: list[Tensor],
        wanted: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Feeds tokens, writes their keys and values, and returns (logits, attention entropy, hidden state)
        where asked.

        tokens, positions, rows: int64 [T]; token t is at `positions[t]` of row `rows[t]` of `block_table`
        (int64 [R, blocks]) and sees the keys 0..positions[t], those of this pass included. Caches: one
        tensor a layer, [num_blocks, kv_heads, block_size, head_dim], float32 or bfloat16, written in place.
        wanted: int64 [P], indices into the T tokens. Logits: float32 [P, vocab]; entropy: float32 [P],
        nats, mean over the heads of the last layer; hidden: float32 [P, hidden], behind the final norm. A
        token's results do not depend, in any bit, on what else is in the pass. Raises RuntimeError naming an
        index that is out of range.
        """
        logits, entropy, hidden = self._decoder.forward(
            tokens, positions, rows, block_table, k_cache, v_cache, wanted
        )
        return logits, entropy, hidden


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: Tensor,
    positions: Tensor,
    block_table: Tensor,
    scale: float,
) -> Tensor:
    """Causal grouped-query attention over cached keys: float32 [T, heads, head_dim] in and out.

    rows, positions, block_table and caches as in `Decoder.forward`; the keys must already be written.
    """
    out: Tensor = torch.ops.tokentape.attention(q, k_cache, v_cache, rows, positions, block_table, scale)
    return out


def _flatten(layer: LayerWeights) -> list[Tensor]:
    """The order that src/ops.cpp reads."""
    flat = [layer.input_norm, _or_none(layer.q_norm), _or_none(layer.k_norm), layer.post_norm]
    linears = (
        (layer.qkv, layer.qkv_bias),
        (layer.o, layer.o_bias),
        (layer.gate_up, layer.gate_up_bias),
        (layer.down, layer.down_bias),
    )
    for packed, bias in linears:
        flat += [packed.weight, packed.scale, _or_none(bias)]
    return flat


def _or_none(tensor: Tensor | None) -> Tensor:
    return _NONE if tensor is None else tensor

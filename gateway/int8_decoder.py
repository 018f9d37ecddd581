"""The decoder forward on the int8 CPU kernels: quantized once at load, one operator call a pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gateway import kernels
from gateway.cache import CacheShape, KVCache
from gateway.layout import Feed, Forward, Layout
from gateway.torch_decoder import Layer, embed_scale, head_dim, norm_weight, take_layer

STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary variants whose angles depend on the position alone, so that one table serves every length."""

MOST_POSITIONS = 32768
"""Rows of the rotary table; longer contexts than this do not fit a CPU's patience."""


class Int8Decoder:
    """Weights of a Hugging Face model in groups of 128, of `bits` each; activations in int8, quantized per
    token; KV in bfloat16.

    A token's result does not depend, in any bit, on its neighbours in the pass or on how the text was cut
    into passes. Raises ValueError for models the kernels cannot run, RuntimeError where they are not built.
    """

    num_spare_blocks = 0

    def __init__(self, hf: Any, bits: kernels.Bits = 8) -> None:
        config = hf.config
        if not kernels.available():
            raise RuntimeError("the int8 kernels could not be built on this machine")
        shape = kernels.DecoderShape(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim(config),
            norm_eps=config.rms_norm_eps,
            attention_scale=head_dim(config) ** -0.5,
            activation="silu" if config.hidden_act == "silu" else "gelu_tanh",
            embed_scale=embed_scale(hf),
        )
        rotary = hf.model.rotary_emb
        if rotary.rope_type not in STATIC_ROPE:
            raise ValueError(f"rope type {rotary.rope_type!r} is not supported by the int8 kernels")
        positions = min(config.max_position_embeddings, MOST_POSITIONS)
        embed = hf.model.embed_tokens.weight.detach()
        cos, sin = rotary(embed.new_empty(1, dtype=torch.float32), torch.arange(positions)[None])
        half = cos.shape[-1] // 2
        head = kernels.quantize_weight(hf.lm_head.weight, bits)
        self.device = torch.device("cpu")
        self.vocab_size: int = config.vocab_size
        self.max_positions: int | None = positions
        self.hidden_size: int = config.hidden_size
        self.cache_shape = CacheShape(
            config.num_hidden_layers, config.num_key_value_heads, head_dim(config), torch.bfloat16
        )
        self._decoder = kernels.Decoder(
            shape,
            embed=embed,
            cos=cos[0, :, :half].float().contiguous(),
            sin=sin[0, :, :half].float().contiguous(),
            final_norm=norm_weight(hf.model.norm).float(),
            head=head,
            layers=[_quantize(take_layer(layer), bits) for layer in hf.model.layers],
        )

    def __call__(self, feeds: Sequence[Feed], cache: KVCache) -> Forward:
        """One pass over the flat tokens of all feeds."""
        layout = Layout(feeds, cache.block_size, self.device)
        logits, attn_entropy, hidden = self._decoder.forward(
            layout.tokens,
            layout.positions,
            layout.rows,
            layout.block_table(),
            cache.keys,
            cache.values,
            layout.wanted,
        )
        return Forward(logits, attn_entropy, hidden)


def _quantize(layer: Layer, bits: kernels.Bits) -> kernels.LayerWeights:
    return kernels.LayerWeights(
        input_norm=layer.input_norm.float(),
        post_norm=layer.post_norm.float(),
        qkv=kernels.quantize_weight(layer.qkv, bits),
        o=kernels.quantize_weight(layer.out, bits),
        gate_up=kernels.quantize_weight(layer.gate_up, bits),
        down=kernels.quantize_weight(layer.down, bits),
        qkv_bias=_float(layer.qkv_bias),
        q_norm=_float(layer.q_norm),
        k_norm=_float(layer.k_norm),
    )


def _float(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.float()

"""One causal LM as the engine runs it: ragged rows of new tokens in, logits at the asked positions out.

The weights are those of a Hugging Face checkpoint; the forward is ours, over the slot cache. Tokens of all
rows lie flat in one [tokens, hidden] matrix, so nothing is padded, and attention is taken row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from gateway.cache import CacheShape, KVCache


@dataclass(frozen=True, slots=True)
class Feed:
    """New tokens of one row, at positions start, start + 1, ...; logits are wanted at the last num_logits."""

    blocks: tuple[int, ...]
    start: int
    tokens: Sequence[int]
    num_logits: int


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's weights, query/key/value and gate/up fused."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


class CausalLM:
    """A decoder of the Llama, Qwen2, Qwen3 or Mistral family with its KV cache."""

    def __init__(self, hf: Any, device: torch.device) -> None:
        config = hf.config
        self.device = device
        self.vocab_size: int = config.vocab_size
        self.eps: float = config.rms_norm_eps
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.num_heads
        self.rotary = hf.model.rotary_emb
        self.embed: Tensor = hf.model.embed_tokens.weight.detach()
        self.norm: Tensor = hf.model.norm.weight.detach()
        self.head: Tensor = hf.lm_head.weight.detach()
        self.layers = [_take_layer(layer) for layer in hf.model.layers]
        self.dtype = self.embed.dtype
        self.cache: KVCache | None = None

    @classmethod
    def load(cls, folder: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> CausalLM:
        """The model in a Hugging Face folder, on `device`, in `dtype`."""
        hf = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        return cls(hf.to(device).eval(), torch.device(device))

    @property
    def cache_shape(self) -> CacheShape:
        """What one position costs in the cache."""
        return CacheShape(len(self.layers), self.num_kv_heads, self.head_dim, self.dtype)

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Make the KV cache; call once before `forward`."""
        self.cache = KVCache(self.cache_shape, num_blocks, block_size, self.device)

    def copy_prefix(self, source: tuple[int, ...], target: tuple[int, ...], length: int) -> None:
        """Copy keys and values of the first `length` positions from one row's blocks to another's."""
        if self.cache is not None:
            self.cache.copy(source, target, length)

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed]) -> Tensor:
        """Logits float32 [sum of num_logits, vocab_size], in the order of feeds and positions."""
        cache = self.cache
        if cache is None:
            raise RuntimeError("allocate() the KV cache before forward()")
        layout = _Layout(feeds, cache.block_size, self)
        h = F.embedding(layout.tokens, self.embed)
        cos, sin = self.rotary(h[None], layout.positions[None])
        cos, sin = cos[0, :, None], sin[0, :, None]
        for i, layer in enumerate(self.layers):
            h = h + self._attend(i, layer, self._rms_norm(h, layer.input_norm), cos, sin, layout, cache)
            gate, up = F.linear(self._rms_norm(h, layer.post_norm), layer.gate_up).chunk(2, dim=-1)
            h = h + F.linear(F.silu(gate) * up, layer.down)
        if not layout.wanted:
            return h.new_empty((0, self.vocab_size), dtype=torch.float32)
        return F.linear(self._rms_norm(h[layout.wanted], self.norm), self.head).float()

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)

    def _attend(
        self, i: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, layout: _Layout, cache: KVCache
    ) -> Tensor:
        heads, kv_heads, dim = self.num_heads, self.num_kv_heads, self.head_dim
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(x.shape[0], heads + 2 * kv_heads, dim)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._rms_norm(q, layer.q_norm), self._rms_norm(k, layer.k_norm)
        q = q * cos + _rotate_half(q) * sin
        k = k * cos + _rotate_half(k) * sin
        cache.write(i, layout.blocks, layout.offsets, k, v)
        out = torch.empty_like(q)
        for span in layout.spans:
            # Query heads sharing a KV head go into its query axis: torch would copy K and V otherwise.
            rows = q[span.first : span.last]
            n = span.last - span.first
            packed = rows.view(n, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
            packed = packed.reshape(1, kv_heads, -1, dim)
            keys, values = cache.read(i, span.row, span.length)
            got = F.scaled_dot_product_attention(packed, keys[None], values[None], attn_mask=span.mask)
            got = got.view(kv_heads, heads // kv_heads, n, dim).permute(2, 0, 1, 3)
            out[span.first : span.last] = got.reshape(n, heads, dim)
        return F.linear(out.view(x.shape[0], heads * dim), layer.out)


@dataclass(frozen=True, slots=True)
class _Span:
    """One row's share of the flat tokens; mask is additive [heads per KV head * tokens, length] or None."""

    first: int
    last: int
    row: tuple[int, ...]
    length: int
    mask: Tensor | None


class _Layout:
    """Where each flat token of a pass stands: position, block, offset; and each row's span and mask."""

    def __init__(self, feeds: Sequence[Feed], block_size: int, model: CausalLM) -> None:
        tokens: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        self.wanted: list[int] = []
        self.spans: list[_Span] = []
        group = model.num_heads // model.num_kv_heads
        for feed in feeds:
            first, n = len(tokens), len(feed.tokens)
            length = feed.start + n
            tokens.extend(feed.tokens)
            positions.extend(range(feed.start, length))
            blocks.extend(feed.blocks[p // block_size] for p in range(feed.start, length))
            self.wanted.extend(range(first + n - feed.num_logits, first + n))
            mask = _causal_mask(feed.start, n, group, model) if n > 1 else None
            self.spans.append(_Span(first, first + n, feed.blocks, length, mask))
        self.tokens = torch.tensor(tokens, device=model.device)
        self.positions = torch.tensor(positions, device=model.device)
        self.blocks = torch.tensor(blocks, device=model.device)
        self.offsets = self.positions % block_size


def _causal_mask(start: int, n: int, group: int, model: CausalLM) -> Tensor:
    allowed = torch.ones(n, start + n, dtype=torch.bool, device=model.device).tril(diagonal=start)
    mask = torch.zeros(n, start + n, dtype=model.dtype, device=model.device)
    mask.masked_fill_(~allowed, float("-inf"))
    return mask.repeat(group, 1)


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _take_layer(hf_layer: Any) -> Layer:
    """The layer's weights, fused; the originals are let go so that memory holds one copy."""
    attn, mlp = hf_layer.self_attn, hf_layer.mlp
    projections = (attn.q_proj, attn.k_proj, attn.v_proj)
    for left_out in (attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        if left_out.bias is not None:
            raise ValueError("models with a bias on the attention output or the MLP are not supported")
    biases = [p.bias for p in projections if p.bias is not None]
    layer = Layer(
        input_norm=hf_layer.input_layernorm.weight.detach(),
        qkv=torch.cat([p.weight.detach() for p in projections]),
        qkv_bias=torch.cat([b.detach() for b in biases]) if biases else None,
        q_norm=attn.q_norm.weight.detach() if hasattr(attn, "q_norm") else None,
        k_norm=attn.k_norm.weight.detach() if hasattr(attn, "k_norm") else None,
        out=attn.o_proj.weight.detach(),
        post_norm=hf_layer.post_attention_layernorm.weight.detach(),
        gate_up=torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()]),
        down=mlp.down_proj.weight.detach(),
    )
    for module in (*projections, mlp.gate_proj, mlp.up_proj):
        module.weight = None
    return layer

"""The decoder forward in plain torch: fused projections, attention row by row over the slot cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

from gateway.cache import CacheShape, KVCache
from gateway.layout import Feed, Forward, Layout, Span


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


class TorchDecoder:
    """Weights taken from a Hugging Face model of the Llama, Mistral, Qwen2, Qwen3 or Gemma family."""

    num_spare_blocks = 0

    def __init__(self, hf: Any) -> None:
        config = hf.config
        self.vocab_size: int = config.vocab_size
        self.max_positions: int | None = config.max_position_embeddings
        self.hidden_size: int = config.hidden_size
        self.eps: float = config.rms_norm_eps
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = head_dim(config)
        self.rotary = hf.model.rotary_emb
        self.embed: Tensor = hf.model.embed_tokens.weight.detach()
        self.norm: Tensor = norm_weight(hf.model.norm)
        self.head: Tensor = hf.lm_head.weight.detach()
        self.layers = [take_layer(layer) for layer in hf.model.layers]
        self.gelu = config.hidden_act != "silu"
        self.dtype = self.embed.dtype
        # Hugging Face rounds the scale to the weights' format before it multiplies.
        self.embed_scale = torch.tensor(embed_scale(hf), dtype=self.dtype).item()
        self.device = self.embed.device
        self.cache_shape = CacheShape(len(self.layers), self.num_kv_heads, self.head_dim, self.dtype)

    def __call__(self, feeds: Sequence[Feed], cache: KVCache) -> Forward:
        """One pass over the flat tokens of all feeds."""
        layout = Layout(feeds, cache.block_size, self.device)
        h = self._embed(layout.tokens)
        cos, sin = self._rotation(h, layout.positions)
        masks = [self._mask(span) for span in layout.spans]
        q = h
        for i, layer in enumerate(self.layers):
            x = self._rms_norm(h, layer.input_norm)
            q = self._project(i, layer, x, cos, sin, layout.blocks, layout.offsets, cache)
            attended = self._attend(i, q, layout, masks, cache)
            h = self._feed_forward(layer, h + F.linear(attended, layer.out))
        h = h[layout.wanted]
        entropy = self._attention_entropy(q, layout, masks, cache)
        return Forward(self._logits(h), entropy, self._normed(h))

    def _embed(self, tokens: Tensor) -> Tensor:
        h = F.embedding(tokens, self.embed)
        return h if self.embed_scale == 1.0 else h * self.embed_scale

    def _rotation(self, h: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [tokens, 1, head_dim] of flat positions."""
        cos, sin = self.rotary(h[None], positions[None])
        return cos[0, :, None], sin[0, :, None]

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, self.eps).to(x.dtype)

    def _feed_forward(self, layer: Layer, h: Tensor) -> Tensor:
        gate, up = F.linear(self._rms_norm(h, layer.post_norm), layer.gate_up).chunk(2, dim=-1)
        gate = F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)
        return h + F.linear(gate * up, layer.down)

    def _normed(self, h: Tensor) -> Tensor:
        return self._rms_norm(h, self.norm)

    def _logits(self, h: Tensor) -> Tensor:
        return F.linear(self._normed(h), self.head).float()

    def _project(
        self,
        i: int,
        layer: Layer,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        blocks: Tensor,
        offsets: Tensor,
        cache: KVCache,
    ) -> Tensor:
        """Queries [tokens, heads, head_dim]; keys and values go into the cache."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(-1, heads + 2 * kv_heads, self.head_dim)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._rms_norm(q, layer.q_norm), self._rms_norm(k, layer.k_norm)
        k = k * cos + _rotate_half(k) * sin
        cache.write(i, blocks, offsets, k, v)
        return q * cos + _rotate_half(q) * sin

    def _attend(
        self, i: int, q: Tensor, layout: Layout, masks: list[Tensor | None], cache: KVCache
    ) -> Tensor:
        """Attention of every row over its own keys: [tokens, heads * head_dim]."""
        out = torch.empty_like(q)
        for span, mask in zip(layout.spans, masks, strict=True):
            keys, values = cache.read(i, span.blocks, span.length)
            got = F.scaled_dot_product_attention(
                self._packed(q[span.first : span.last]), keys[None], values[None], attn_mask=mask
            )
            n, group = span.last - span.first, self.num_heads // self.num_kv_heads
            got = got.view(self.num_kv_heads, group, n, self.head_dim).permute(2, 0, 1, 3)
            out[span.first : span.last] = got.reshape(n, self.num_heads, self.head_dim)
        return out.view(q.shape[0], -1)

    def _packed(self, q: Tensor) -> Tensor:
        """Query heads that share a KV head go into its query axis: torch would copy K and V otherwise."""
        n, kv_heads = q.shape[0], self.num_kv_heads
        q = q.view(n, kv_heads, self.num_heads // kv_heads, self.head_dim).permute(1, 2, 0, 3)
        return q.reshape(1, kv_heads, -1, self.head_dim)

    def _mask(self, span: Span) -> Tensor | None:
        """Additive causal mask [heads per KV head * new tokens, length]; one new token needs none."""
        n = span.last - span.first
        if n == 1:
            return None
        allowed = torch.ones(n, span.length, dtype=torch.bool, device=self.device).tril(span.length - n)
        mask = torch.zeros(n, span.length, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~allowed, float("-inf")).repeat(self.num_heads // self.num_kv_heads, 1)

    def _attention_entropy(
        self, q: Tensor, layout: Layout, masks: list[Tensor | None], cache: KVCache
    ) -> Tensor:
        """Entropy of the last layer's attention at the wanted positions, taken apart from the fused path."""
        entropies = torch.zeros(q.shape[0], device=self.device)
        wanted = set(layout.wanted.tolist())
        for span, mask in zip(layout.spans, masks, strict=True):
            if span.last - 1 not in wanted:
                continue
            keys, _ = cache.read(len(self.layers) - 1, span.blocks, span.length)
            scores = self._packed(q[span.first : span.last])[0] @ keys.transpose(1, 2)
            scores = scores * self.head_dim**-0.5
            p = torch.softmax((scores if mask is None else scores + mask).float(), dim=-1)
            entropy = torch.special.entr(p).sum(-1).view(self.num_heads, -1)
            entropies[span.first : span.last] = entropy.mean(0)
        return entropies[layout.wanted]


def head_dim(config: Any) -> int:
    """Width of one attention head by a Hugging Face config."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def embed_scale(hf: Any) -> float:
    """What a Hugging Face model multiplies its embeddings by: Gemma's root of the hidden size, else 1."""
    return float(getattr(hf.model.embed_tokens, "scalar_embed_scale", 1.0))


def norm_weight(norm: Any) -> Tensor:
    """The factor of an RMS norm: Gemma keeps w and means 1 + w, in float32 whatever its format."""
    weight: Tensor = norm.weight.detach()
    return 1.0 + weight.float() if isinstance(norm, GemmaRMSNorm) else weight


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def take_layer(hf_layer: Any) -> Layer:
    """A Hugging Face layer's weights, fused; the originals are let go so that memory holds one copy."""
    attn, mlp = hf_layer.self_attn, hf_layer.mlp
    projections = (attn.q_proj, attn.k_proj, attn.v_proj)
    for left_out in (attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        if left_out.bias is not None:
            raise ValueError("models with a bias on the attention output or the MLP are not supported")
    biases = [p.bias for p in projections if p.bias is not None]
    layer = Layer(
        input_norm=norm_weight(hf_layer.input_layernorm),
        qkv=torch.cat([p.weight.detach() for p in projections]),
        qkv_bias=torch.cat([b.detach() for b in biases]) if biases else None,
        q_norm=attn.q_norm.weight.detach() if hasattr(attn, "q_norm") else None,
        k_norm=attn.k_norm.weight.detach() if hasattr(attn, "k_norm") else None,
        out=attn.o_proj.weight.detach(),
        post_norm=norm_weight(hf_layer.post_attention_layernorm),
        gate_up=torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()]),
        down=mlp.down_proj.weight.detach(),
    )
    for module in (*projections, mlp.gate_proj, mlp.up_proj):
        module.weight = None
    return layer

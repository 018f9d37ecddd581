"""One causal LM as the engine runs it: ragged rows of new tokens in, logits at the asked positions out.

The weights are those of a Hugging Face checkpoint; the forward is ours, over the slot cache. Tokens of all
rows lie flat in one [tokens, hidden] matrix, so nothing is padded. Two decoders do the arithmetic: torch
(torch_decoder.py; any device, the reference) and the int8 CPU kernels (int8_decoder.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from transformers import AutoModelForCausalLM

from gateway.cache import CacheShape, KVCache
from gateway.int8_decoder import Int8Decoder
from gateway.layout import Feed, Forward, Layout
from gateway.summary import Summarize, by_kernels, by_torch
from gateway.torch_decoder import TorchDecoder

Quantize = Literal["none", "int8"]


class Decoder(Protocol):
    """The arithmetic of one model."""

    device: torch.device
    vocab_size: int
    cache_shape: CacheShape

    def __call__(self, layout: Layout, cache: KVCache) -> Forward: ...


class CausalLM:
    """A decoder of the Llama, Qwen2, Qwen3 or Mistral family with its KV cache.

    summarize: how its logits are best read.
    """

    def __init__(self, decoder: Decoder, summarize: Summarize = by_torch) -> None:
        self.decoder = decoder
        self.summarize = summarize
        self.cache: KVCache | None = None

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        quantize: Quantize = "none",
    ) -> CausalLM:
        """The model in a Hugging Face folder, on `device`, in `dtype` or as int8 (CPU only)."""
        hf: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        if quantize == "int8":
            return cls(Int8Decoder(hf.eval()), by_kernels)
        return cls(TorchDecoder(hf.to(device).eval()))

    @property
    def vocab_size(self) -> int:
        """Width of the logits; a padded head is wider than the tokenizer."""
        return self.decoder.vocab_size

    @property
    def cache_shape(self) -> CacheShape:
        """What one position costs in the cache."""
        return self.decoder.cache_shape

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Make the KV cache; call once before `forward`."""
        self.cache = KVCache(self.cache_shape, num_blocks, block_size, self.decoder.device)

    def copy_prefix(self, source: tuple[int, ...], target: tuple[int, ...], length: int) -> None:
        """Copy keys and values of the first `length` positions from one row's blocks to another's."""
        if self.cache is not None:
            self.cache.copy(source, target, length)

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed]) -> Forward:
        """Run one pass; logits come in the order of feeds and positions."""
        if self.cache is None:
            raise RuntimeError("allocate() the KV cache before forward()")
        return self.decoder(Layout(feeds, self.cache.block_size, self.decoder.device), self.cache)

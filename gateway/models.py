"""One causal LM as the engine runs it: ragged rows of new tokens in, logits at the asked positions out.

The weights are those of a Hugging Face checkpoint; the forward is ours, over the slot cache. Tokens of all
rows lie flat in one [tokens, hidden] matrix, so nothing is padded. Four decoders do the arithmetic: torch
(torch_decoder.py; any device, the reference), the int8 CPU kernels (int8_decoder.py), padded buckets as CUDA
graphs (static_decoder.py), and Hugging Face's own forward for other families (hf_decoder.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import structlog
import torch
from transformers import AutoModelForCausalLM

from gateway.cache import CacheShape, KVCache
from gateway.family import reason_for_fallback
from gateway.hf_decoder import HFDecoder
from gateway.int8_decoder import Int8Decoder
from gateway.layout import Feed, Forward
from gateway.static_decoder import Drafts, StaticDecoder
from gateway.summary import Summarize, by_kernels, by_torch
from gateway.torch_decoder import TorchDecoder

log = structlog.get_logger("gateway")

Quantize = Literal["none", "int8", "int4"]


class Decoder(Protocol):
    """The arithmetic of one model.

    max_positions: longest text it can read, None where nothing bounds it. num_spare_blocks: KV blocks it
    wants for itself behind those of the rows.
    """

    device: torch.device
    vocab_size: int
    max_positions: int | None
    num_spare_blocks: int
    hidden_size: int
    cache_shape: CacheShape

    def __call__(self, feeds: Sequence[Feed], cache: KVCache) -> Forward: ...


class CausalLM:
    """A causal decoder with its KV cache.

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
        """The model in a Hugging Face folder, on `device`, in `dtype` or quantized (lean families on a CPU).

        Raises ValueError, naming the reason, for one whose drafted tokens could not be dropped.
        """
        hf: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        reason = reason_for_fallback(hf.config.to_dict())
        if reason is None:
            return cls.of(hf.to(device), quantize)
        log.warning("hugging_face_forward", folder=str(folder), reason=reason)
        return cls(HFDecoder(hf.to(device).eval()))

    @classmethod
    def of(cls, hf: Any, quantize: Quantize) -> CausalLM:
        """A Hugging Face model of a lean family, where it lies; its weights are taken, not copied."""
        if quantize != "none":
            return cls(Int8Decoder(hf.eval(), 4 if quantize == "int4" else 8), by_kernels)
        return cls(StaticDecoder(hf.eval()) if hf.device.type == "cuda" else TorchDecoder(hf.eval()))

    @property
    def vocab_size(self) -> int:
        """Width of the logits; a padded head is wider than the tokenizer."""
        return self.decoder.vocab_size

    @property
    def hidden_size(self) -> int:
        """Width of a hidden state; 0 where the decoder does not tell any."""
        return self.decoder.hidden_size

    @property
    def cache_shape(self) -> CacheShape:
        """What one position costs in the cache."""
        return self.decoder.cache_shape

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Make the KV cache; call once before `forward`."""
        decoder = self.decoder
        self.cache = KVCache(
            self.cache_shape, num_blocks, block_size, decoder.device, num_spare=decoder.num_spare_blocks
        )

    def copy_prefix(self, source: tuple[int, ...], target: tuple[int, ...], length: int) -> None:
        """Copy keys and values of the first `length` positions from one row's blocks to another's."""
        if self.cache is not None:
            self.cache.copy(source, target, length)

    @torch.inference_mode()
    def forward(self, feeds: Sequence[Feed]) -> Forward:
        """Run one pass; logits come in the order of feeds and positions."""
        out = self.decoder(feeds, self._made())
        self._wait()
        return out

    @torch.inference_mode()
    def draft(self, feeds: Sequence[Feed], steps: int, vocab_size: int) -> Drafts | None:
        """A pass and `steps` greedy tokens behind it; None where the decoder cannot, or not so many."""
        if not isinstance(self.decoder, StaticDecoder):
            return None
        out = self.decoder.draft(feeds, steps, vocab_size, self._made())
        self._wait()
        return out

    def _made(self) -> KVCache:
        if self.cache is None:
            raise RuntimeError("allocate() the KV cache before forward()")
        return self.cache

    def _wait(self) -> None:
        """A pass has ended when it returns, so that its time is its own; what is read of it waits anyway."""
        if self.decoder.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

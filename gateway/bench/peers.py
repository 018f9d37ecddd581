"""What one would use instead, measured in the same run: Hugging Face generate, its assisted generation and
prompt lookup, and the seed method's minimal implementation. One prompt at a time, bfloat16."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

Generate = Callable[[list[int], int], list[int]]
"""(prompt ids, max tokens) -> output ids."""

PROTECT_FIRST = 10
THRESHOLD = 0.5


class Peers:
    """Both models as transformers loads them."""

    def __init__(self, small: Path, large: Path, pad_token_id: int) -> None:
        self.small, self.large = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True).eval()
            for folder in (small, large)
        )
        self.pad_token_id = pad_token_id

    def all(self) -> dict[str, Generate]:
        """Every peer by name."""
        return {
            "HF generate": lambda ids, num: self._hf(ids, num),
            "HF assisted": lambda ids, num: self._hf(ids, num, assistant_model=self.small),
            "HF prompt lookup": lambda ids, num: self._hf(ids, num, prompt_lookup_num_tokens=5),
            "seed method, minimal": self._seed_method,
        }

    def _hf(self, ids: list[int], max_tokens: int, **options: Any) -> list[int]:
        out = self.large.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            pad_token_id=self.pad_token_id,
            **options,
        )
        tokens: list[int] = out[0, len(ids) :].tolist()
        return tokens

    @torch.inference_mode()
    def _seed_method(self, ids: list[int], max_tokens: int) -> list[int]:
        """Batch 1; the small model writes while its gap is at least the threshold, and at each deferral the
        large model reads the whole context again to write one token."""
        context, cache, seen = list(ids), None, 0
        while len(context) - len(ids) < max_tokens:
            token = None
            if len(context) - len(ids) >= PROTECT_FIRST:
                out = self.small(torch.tensor([context[seen:]]), cache=cache, use_cache=True)
                cache, seen = out.cache, len(context)
                top = torch.softmax(out.logits[0, -1].float(), dim=-1).topk(2)
                if float(top.values[0] - top.values[1]) >= THRESHOLD:
                    token = int(top.indices[0])
            if token is None:
                logits = self.large(torch.tensor([context]), use_cache=False, logits_to_keep=1).logits
                token = int(logits[0, -1].argmax())
            context.append(token)
        return context[len(ids) :]


def tokens_per_s(generate: Generate, prompts: Sequence[list[int]], max_tokens: int) -> float:
    """Throughput over whole answers, prefill included; one after the other."""
    began = time.perf_counter()
    num = sum(len(generate(list(ids), max_tokens)) for ids in prompts)
    return num / (time.perf_counter() - began)

"""What one would use instead, measured in the same run: Hugging Face generate, its assisted generation and
prompt lookup, and the seed method's minimal implementation, one prompt at a time in bfloat16; llama.cpp."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

Generate = Callable[[list[int], int], list[int]]
"""(prompt ids, max tokens) -> output ids."""

Speed = Callable[[Sequence[list[int]], int], float]
"""(prompts, max tokens) -> tokens/s over whole answers, prefill included."""

PROTECT_FIRST = 10
THRESHOLD = 0.5

SAMPLE_PROMPTS, SAMPLE_TOKENS = 2, 48
"""Of a peer that takes one prompt at a time, so much is measured: more of the same says nothing more."""


@dataclass(frozen=True, slots=True)
class PeerLine:
    """One of our settings held against a peer; ratio: median over rounds of tokens/s over the peer's, whole
    answers, prefill included, each between two runs of the peer."""

    workload: str
    num_rows: int
    peer: str
    peer_tokens_per_s: float
    setting: str
    ratio: float
    ratios: tuple[float, ...]

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def hold_against(
    peer: Callable[[], float], ours: Mapping[str, Callable[[], float]], repeats: int
) -> tuple[float, dict[str, list[float]]]:
    """A B A B ...: the peer between all runs of ours. The peer's median tokens/s, and ratios by setting."""
    ratios: dict[str, list[float]] = {name: [] for name in ours}
    beside = [peer()]
    for _ in range(repeats):
        for name, run in ours.items():
            speed = run()
            beside.append(peer())
            ratios[name].append(speed / fmean(beside[-2:]))
    return median(beside), ratios


def one_at_a_time(generate: Generate) -> Speed:
    """The speed of what takes one prompt at a time, from a sample."""

    def speed(prompts: Sequence[list[int]], max_tokens: int) -> float:
        num = min(max_tokens, SAMPLE_TOKENS)
        began = time.perf_counter()
        written = sum(len(generate(list(ids), num)) for ids in islice(prompts, SAMPLE_PROMPTS))
        return written / (time.perf_counter() - began)

    return speed


def in_batches(generate: Callable[[Sequence[list[int]], int], list[list[int]]], num_rows: int) -> Speed:
    """The speed of what takes num_rows prompts at a time."""

    def speed(prompts: Sequence[list[int]], max_tokens: int) -> float:
        began = time.perf_counter()
        starts = range(0, len(prompts), num_rows)
        answers = [a for i in starts for a in generate(prompts[i : i + num_rows], max_tokens)]
        return sum(map(len, answers)) / (time.perf_counter() - began)

    return speed


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

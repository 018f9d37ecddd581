"""llama.cpp as a peer: the same large model as a GGUF file, many sequences in one batch, or prompt lookup."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import torch
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

BATCH = 512
"""Most tokens of one llama_decode, its own default."""

MAX_LEN = 2048
"""Longest prompt and answer of prompt lookup."""

LOOKUP_TOKENS = 2
"""Drafted tokens of prompt lookup: what llama-cpp-python's documentation recommends on a CPU."""


_SILENT = llama_cpp.llama_log_callback(lambda level, text, data: None)
"""llama.cpp reports every tensor it loads. Kept here, since it keeps only the address."""


class Sequences:
    """A GGUF file whose sequences decode together, greedily."""

    def __init__(self, file: Path) -> None:
        llama_cpp.llama_log_set(_SILENT, None)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            str(file).encode(), llama_cpp.llama_model_default_params()
        )
        if self.model is None:
            raise ValueError(f"{file}: llama.cpp cannot load it")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self.room = (0, 0)
        self.context: Any = None

    def _make_room(self, num_rows: int, length: int) -> None:
        """A context that holds num_rows sequences of `length` tokens, empty."""
        if num_rows != self.room[0] or length > self.room[1]:
            if self.context is not None:
                llama_cpp.llama_free(self.context)
            options = llama_cpp.llama_context_default_params()
            options.n_ctx = num_rows * length
            options.n_batch = options.n_ubatch = BATCH
            options.n_seq_max = num_rows
            options.n_threads = options.n_threads_batch = torch.get_num_threads()
            self.context = llama_cpp.llama_init_from_model(self.model, options)
            if self.context is None:
                raise MemoryError(f"llama.cpp has no room for {num_rows} x {length} tokens")
            self.room = (num_rows, length)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """max_tokens greedy tokens behind each prompt, all prompts as one batch."""
        self._make_room(len(prompts), max(map(len, prompts)) + max_tokens)
        answers: list[list[int]] = [[] for _ in prompts]
        fed = [(row, i, token) for row, ids in enumerate(prompts) for i, token in enumerate(ids)]
        last = [len(ids) - 1 for ids in prompts]
        while len(answers[0]) < max_tokens:
            for row, token in self._decode(fed, last):
                answers[row].append(token)
            last = [position + 1 for position in last]
            fed = [
                (row, len(ids) + len(answer) - 1, answer[-1])
                for row, (ids, answer) in enumerate(zip(prompts, answers, strict=True))
            ]
        return answers

    def _decode(self, fed: Sequence[tuple[int, int, int]], last: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Feeds (row, position, token); gives (row, next token) behind each row's `last` position."""
        batch = self.batch
        for start in range(0, len(fed), BATCH):
            chunk = fed[start : start + BATCH]
            batch.n_tokens = len(chunk)
            for i, (row, position, token) in enumerate(chunk):
                batch.token[i], batch.pos[i] = token, position
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
                batch.logits[i] = position == last[row]
            if llama_cpp.llama_decode(self.context, batch) != 0:
                raise RuntimeError(f"llama_decode failed on {len(chunk)} tokens")
            for i, (row, _, _) in enumerate(chunk):
                if batch.logits[i]:
                    logits = llama_cpp.llama_get_logits_ith(self.context, i)
                    yield row, int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())


class PromptLookup:
    """llama-cpp-python's own class with its prompt-lookup drafts; one prompt at a time."""

    def __init__(self, file: Path) -> None:
        self.llama = llama_cpp.Llama(
            str(file),
            n_ctx=MAX_LEN,
            n_threads=torch.get_num_threads(),
            n_threads_batch=torch.get_num_threads(),
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS),
            logits_all=True,
            verbose=False,
        )

    def generate(self, ids: list[int], max_tokens: int) -> list[int]:
        """max_tokens greedy tokens."""
        self.llama.reset()
        tokens = self.llama.generate(ids, temp=0.0, top_k=1)
        return [token for _, token in zip(range(max_tokens), tokens, strict=False)]

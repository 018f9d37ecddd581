"""llama.cpp as a peer: what we measure is greedy decoding of the model we think it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_fakes import hf_model, write_gguf

pytest.importorskip("llama_cpp", reason="the extra `peers` is not installed")

from gateway.bench.llama_cpp import PromptLookup, Sequences

PROMPTS = [[5, 17, 3], [200, 1, 2, 3, 4, 5, 6, 7], [99], list(range(40, 80))]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return hf_model("qwen2", tied=True)


@pytest.fixture(scope="module")
def file(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", model)


def _greedy(model: torch.nn.Module, ids: list[int], num: int) -> list[int]:
    text = list(ids)
    with torch.no_grad():
        for _ in range(num):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(ids) :]


@pytest.mark.parametrize("num_rows", [1, 2, 4])
def test_sequences_in_one_batch_write_what_each_would_alone(
    model: torch.nn.Module, file: Path, num_rows: int
) -> None:
    sequences = Sequences(file)
    for start in range(0, len(PROMPTS), num_rows):
        group = PROMPTS[start : start + num_rows]
        assert sequences.generate(group, 10) == [_greedy(model, ids, 10) for ids in group]


def test_prompt_lookup_writes_the_same(model: torch.nn.Module, file: Path) -> None:
    lookup = PromptLookup(file)
    for ids in (PROMPTS[3], [7, 8, 9, 7, 8, 9, 7, 8]):
        assert lookup.generate(ids, 10) == _greedy(model, ids, 10)

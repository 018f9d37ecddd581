"""Our forward against transformers' own, over ragged, chunked and rolled-back feeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from gateway.layout import Feed
from gateway.models import CausalLM
from gateway.torch_decoder import TorchDecoder

VOCAB = 97
DIMS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CONFIGS = {
    "llama": LlamaConfig(**DIMS),
    "llama without grouped heads": LlamaConfig(**(DIMS | {"num_key_value_heads": 4})),
    "llama3 rope": LlamaConfig(
        **DIMS,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen2": Qwen2Config(**DIMS),
    "qwen3": Qwen3Config(**DIMS, head_dim=16),
    "qwen2 tied": Qwen2Config(**DIMS, tie_word_embeddings=True),
    "mistral": MistralConfig(**DIMS, head_dim=8, sliding_window=None),
}


class Pair:
    """One set of random weights in transformers' model and in ours; oracle answers from the former."""

    def __init__(self, config: PreTrainedConfig, block_size: int = 128) -> None:
        torch.manual_seed(0)
        hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for weight in hf.parameters():  # biases and norms start at 0 and 1, which would hide mistakes
                weight.add_(0.1 * torch.randn(weight.shape))
        self.texts = torch.randint(0, VOCAB, (4, 100)).tolist()
        with torch.no_grad():
            self.expected = hf(torch.tensor(self.texts)).logits
        self.ours = CausalLM(TorchDecoder(hf))
        self.ours.allocate(-(-128 // block_size) * 4, block_size)
        per_row = -(-128 // block_size)
        self.blocks = [tuple(range(i * per_row, (i + 1) * per_row)) for i in range(4)]

    def feed(self, row: int, start: int, end: int, num_logits: int) -> Feed:
        return Feed(self.blocks[row], start, self.texts[row][start:end], num_logits)

    def check(self, feeds: Sequence[tuple[int, int, int, int]]) -> None:
        """Feeds of (row, start, end, num_logits): the logits are transformers' at those positions."""
        got = self.ours.forward([self.feed(*f) for f in feeds]).logits
        want = [self.expected[row, end - num : end] for row, _, end, num in feeds]
        torch.testing.assert_close(got, torch.cat(want), atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(CONFIGS[request.param])


def test_whole_prompts_of_different_lengths(pair: Pair) -> None:
    pair.check([(0, 0, 7, 7), (1, 0, 100, 100), (2, 0, 1, 1), (3, 0, 40, 3)])


def test_ragged_mix_of_prefill_verification_and_single_steps(pair: Pair) -> None:
    pair.check([(0, 0, 20, 1), (1, 0, 50, 0), (2, 0, 33, 1)])
    pair.check([(0, 20, 21, 1), (3, 0, 60, 2), (1, 50, 90, 1), (2, 33, 39, 6)])
    pair.check([(2, 39, 40, 1), (0, 21, 22, 1), (3, 60, 61, 1), (1, 90, 91, 1)])


def test_chunked_prefill_is_prefill(pair: Pair) -> None:
    for start in range(0, 91, 13):
        pair.check([(0, start, min(start + 13, 91), 2)])


def test_rolling_back_and_decoding_on_is_a_fresh_prefill(pair: Pair) -> None:
    pair.check([(0, 0, 30, 1), (1, 0, 12, 1)])
    wrong = [(t + 1) % VOCAB for t in pair.texts[0][30:37]]
    pair.ours.forward([Feed(pair.blocks[0], 30, wrong, 7), pair.feed(1, 12, 13, 1)])
    pair.check([(0, 30, 33, 3), (1, 13, 20, 7)])
    pair.check([(0, 33, 34, 1)])


@pytest.mark.parametrize("block_size", [1, 8, 17])
def test_rows_over_several_blocks(block_size: int) -> None:
    pair = Pair(CONFIGS["qwen2"], block_size)
    pair.check([(0, 0, 30, 5), (1, 0, 3, 3), (2, 0, 60, 1)])
    pair.check([(0, 30, 38, 8), (1, 3, 4, 1), (2, 55, 61, 6)])


def test_nothing_wanted_gives_no_logits(pair: Pair) -> None:
    assert pair.ours.forward([pair.feed(0, 0, 9, 0)]).logits.shape == (0, VOCAB)


def test_forward_needs_a_cache() -> None:
    hf = AutoModelForCausalLM.from_config(CONFIGS["llama"], dtype=torch.float32)
    with pytest.raises(RuntimeError, match="allocate"):
        CausalLM(TorchDecoder(hf)).forward([Feed((0,), 0, [1], 1)])


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**DIMS, attention_bias=True), LlamaConfig(**DIMS, mlp_bias=True)],
    ids=["output bias", "mlp bias"],
)
def test_weights_that_the_forward_would_leave_out_are_refused(config: PreTrainedConfig) -> None:
    with pytest.raises(ValueError, match="bias"):
        TorchDecoder(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def test_a_folder_loads_in_the_asked_dtype(tmp_path, tiny_pair) -> None:
    model = CausalLM.load(tiny_pair.folder / "large", dtype=torch.bfloat16)
    assert model.cache_shape.dtype == torch.bfloat16
    model.allocate(1, 32)
    logits = model.forward([Feed((0,), 0, [1, 2, 3], 1)]).logits
    assert (logits.dtype, logits.shape) == (torch.float32, (1, model.vocab_size))

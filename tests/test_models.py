"""Our forward against transformers' own, over ragged, chunked and rolled-back feeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from recorded import RecordedDecoder
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from gateway import kernels
from gateway.hf_decoder import HFDecoder
from gateway.int8_decoder import Int8Decoder
from gateway.layout import Feed
from gateway.models import CausalLM, Decoder
from gateway.static_decoder import StaticDecoder
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
    "gemma": GemmaConfig(**DIMS, head_dim=16),
}


def _other(family: str, **changes: Any) -> PreTrainedConfig:
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return AutoConfig.for_model(family, **(DIMS | ends | changes))


OTHERS = {
    "gpt2, learned positions": _other("gpt2", n_inner=48),
    "opt, positions from the mask": _other("opt", ffn_dim=48, word_embed_proj_dim=32),
    "gpt_neox, partial rotary": _other("gpt_neox"),
    "gpt_neo, local attention": _other("gpt_neo", attention_types=[[["global", "local"], 1]], window_size=4),
    "gptj, interleaved rotary": _other("gptj", rotary_dim=4),
    "falcon, one KV head": _other("falcon"),
    "falcon, alibi": _other("falcon", alibi=True),
    "bloom, alibi": _other("bloom"),
    "phi": _other("phi", num_key_value_heads=4),
    "olmo2": _other("olmo2"),
    "gemma2, no sliding": _other("gemma2", head_dim=8, layer_types=["full_attention"] * 2),
    "mixtral": _other("mixtral", num_local_experts=4, sliding_window=None),
    "llama, every bias": LlamaConfig(**DIMS, attention_bias=True, mlp_bias=True),
}


class Pair:
    """One set of random weights in transformers' model and in ours; oracle answers from the former."""

    def __init__(
        self,
        config: PreTrainedConfig,
        block_size: int = 128,
        decoder: Callable[[Any], Decoder] = TorchDecoder,
    ) -> None:
        torch.manual_seed(0)
        hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for weight in hf.parameters():  # biases and norms start at 0 and 1, which would hide mistakes
                weight.add_(0.1 * torch.randn(weight.shape))
        self.texts = torch.randint(0, VOCAB, (4, 100)).tolist()
        with torch.no_grad():
            said = hf(torch.tensor(self.texts), output_hidden_states=True)
        prompt = torch.tensor([self.texts[0][:9]])
        self.written = hf.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
        )[0].tolist()
        self.expected, self.hidden = said.logits, said.hidden_states[-1]
        self.ours = CausalLM(decoder(hf))
        self.ours.allocate(-(-128 // block_size) * 4, block_size)
        per_row = -(-128 // block_size)
        self.blocks = [tuple(range(i * per_row, (i + 1) * per_row)) for i in range(4)]

    def feed(self, row: int, start: int, end: int, num_logits: int) -> Feed:
        return Feed(self.blocks[row], start, self.texts[row][start:end], num_logits)

    def check(self, feeds: Sequence[tuple[int, int, int, int]]) -> None:
        """Feeds of (row, start, end, num_logits): the logits are transformers' at those positions."""
        got = self.ours.forward([self.feed(*f) for f in feeds]).logits.cpu()
        want = [self.expected[row, end - num : end] for row, _, end, num in feeds]
        torch.testing.assert_close(got, torch.cat(want), atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module", params=[*CONFIGS, *OTHERS, *(f"{name}, padded" for name in CONFIGS)])
def pair(request: pytest.FixtureRequest) -> Pair:
    name = request.param
    if name in OTHERS:
        return Pair(OTHERS[name], decoder=HFDecoder)
    if name.endswith(", padded"):
        return Pair(CONFIGS[name.removesuffix(", padded")], block_size=32, decoder=StaticDecoder)
    return Pair(CONFIGS[name])


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


def test_greedy_tokens_are_those_of_generate(pair: Pair) -> None:
    text = pair.texts[0][:9]
    start = 0
    while len(text) < 29:
        feed = Feed(pair.blocks[0], start, text[start:], 1)
        # A neighbour, so that the row does not run alone.
        logits = pair.ours.forward([feed, pair.feed(1, 0, 40, 0)]).logits
        start = len(text)
        text.append(int(logits[0].argmax()))
    assert text == pair.written


@pytest.mark.parametrize("decoder", [TorchDecoder, HFDecoder, StaticDecoder])
@pytest.mark.parametrize("block_size", [1, 8, 17])
def test_rows_over_several_blocks(block_size: int, decoder: Callable[[Any], Decoder]) -> None:
    pair = Pair(CONFIGS["qwen2"], block_size, decoder)
    pair.check([(0, 0, 30, 5), (1, 0, 3, 3), (2, 0, 60, 1)])
    pair.check([(0, 30, 38, 8), (1, 3, 4, 1), (2, 55, 61, 6)])


@pytest.mark.skipif(not kernels.available(), reason="no C++ compiler")
@pytest.mark.parametrize("family", ["qwen2", "gemma"])
def test_the_int8_decoder_is_near_the_family_it_was_taken_from(family: str) -> None:
    """Gemma's scaled embeddings, 1 + w norms and GeGLU, left out, would each be off by far more."""
    config = type(CONFIGS[family])(**(CONFIGS[family].to_dict() | {"hidden_size": 128, "head_dim": 32}))
    pair = Pair(config, decoder=Int8Decoder)
    got = pair.ours.forward([pair.feed(0, 0, 40, 40), pair.feed(1, 0, 9, 9)]).logits
    want = torch.cat([pair.expected[0, :40], pair.expected[1, :9]])
    assert (got - want).norm() < 0.03 * want.norm()


@pytest.mark.skipif(not kernels.available(), reason="no C++ compiler")
def test_int4_gives_the_logits_of_a_model_whose_weights_lie_on_its_levels() -> None:
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(Qwen2Config(**(DIMS | {"hidden_size": 128}))).eval()
    tokens = torch.randint(0, VOCAB, (40,)).tolist()
    with torch.no_grad():
        for weight in hf.parameters():
            weight.add_(0.1 * torch.randn(weight.shape))
        for module in hf.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_(kernels.dequantize_weight(kernels.quantize_weight(module.weight, 4)))
        want = hf(torch.tensor([tokens])).logits[0]
    ours = CausalLM.of(hf, "int4")
    ours.allocate(1, 64)
    got = ours.forward([Feed((0,), 0, tokens, 40)]).logits
    assert (got - want).norm() < 0.03 * want.norm()


def test_the_hidden_state_is_what_transformers_last_layer_says(pair: Pair) -> None:
    pair.check([(0, 0, 20, 1)])
    got = pair.ours.forward([pair.feed(0, 20, 24, 2), pair.feed(1, 0, 9, 1)]).hidden
    if isinstance(pair.ours.decoder, HFDecoder):
        assert (got, pair.ours.hidden_size) == (None, 0)
        return
    want = torch.cat([pair.hidden[0, 22:24], pair.hidden[1, 8:9]])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert pair.ours.hidden_size == want.shape[1]


def test_a_recorded_bucket_serves_every_pass_of_its_shape() -> None:
    pair = Pair(CONFIGS["qwen2"], 32, RecordedDecoder)
    pair.check([(0, 0, 20, 1), (1, 0, 50, 0), (2, 0, 33, 1)])
    pair.check([(0, 20, 21, 1), (3, 0, 30, 2), (1, 50, 80, 1), (2, 33, 39, 6)])
    for i in range(3):
        rows = [(2, 39 + i), (0, 21 + i), (3, 30 + i), (1, 80 + i)]
        pair.check([(row, start, start + 1, 1) for row, start in rows[i:] + rows[:i]])
    assert isinstance(pair.ours.decoder, RecordedDecoder)
    assert len(pair.ours.decoder.graphs) == 2


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


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (_other("gemma2", head_dim=8), "layer 0 keeps a DynamicSlidingWindowLayer: sliding-window"),
        (_other("mamba"), "layer 0 keeps a LinearAttentionLayer.*recurrent"),
        (_other("rwkv"), "takes no cache"),
        (_other("deepseek_v3", num_key_value_heads=4), "keys and values differ in shape"),
        (_other("bert", is_decoder=False), "off by .* not causal"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_models_whose_drafts_cannot_be_dropped_are_refused(config: PreTrainedConfig, reason: str) -> None:
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with pytest.raises(ValueError, match=reason):
        HFDecoder(hf)


def test_a_folder_loads_in_the_asked_dtype(tmp_path, tiny_pair) -> None:
    model = CausalLM.load(tiny_pair.folder / "large", dtype=torch.bfloat16)
    assert model.cache_shape.dtype == torch.bfloat16
    model.allocate(1, 32)
    logits = model.forward([Feed((0,), 0, [1, 2, 3], 1)]).logits
    assert (logits.dtype, logits.shape) == (torch.float32, (1, model.vocab_size))

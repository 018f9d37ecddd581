"""Models that cannot be decoded with rollback are refused, naming the reason. The configs are those that
the named models publish."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.family import reason_for_fallback
from gateway.servable import (
    HashMismatchError,
    ModelsError,
    check_servable,
    reason_against,
)

LLAMA_3 = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": {"factor": 8.0, "rope_type": "llama3"},
}
QWEN_2 = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "max_window_layers": 21,
    "layer_types": ["full_attention"] * 28,
}
QWEN_3 = {"model_type": "qwen3", "num_hidden_layers": 28, "attention_bias": False, "sliding_window": None}
MISTRAL_03 = {"model_type": "mistral", "sliding_window": None, "num_hidden_layers": 32}


GEMMA = {"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}


@pytest.mark.parametrize(
    "config", [LLAMA_3, QWEN_2, QWEN_3, MISTRAL_03, GEMMA], ids=lambda c: c["model_type"]
)
def test_supported_families_pass(config: dict) -> None:
    assert reason_against(config) is None
    assert reason_for_fallback(config) is None


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "gpt2"}, "model_type gpt2"),
        ({"model_type": "olmo2", "layer_types": ["full_attention"]}, "model_type olmo2"),
        (LLAMA_3 | {"mlp_bias": True}, "mlp_bias"),
        (LLAMA_3 | {"attention_bias": True}, "attention_bias"),
        (LLAMA_3 | {"hidden_act": "gelu"}, "hidden_act gelu"),
        (GEMMA | {"hidden_act": "silu"}, "hidden_act silu"),
    ],
)
def test_other_causal_decoders_fall_back_to_hugging_faces_forward(config: dict, reason: str) -> None:
    assert reason_against(config) is None
    assert reason_for_fallback(config) == reason


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MISTRAL_03 | {"sliding_window": 4096}, "sliding-window"),
        (QWEN_2 | {"use_sliding_window": True}, "sliding-window"),
        (QWEN_2 | {"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"model_type": "gemma3_text", "layer_types": ["sliding_attention"]}, "sliding-window"),
        ({"model_type": "llama4_text", "layer_types": ["chunked_attention"]}, "sliding-window"),
        ({"model_type": "mamba", "state_size": 16}, "recurrent or hybrid.*state_size"),
        ({"model_type": "jamba", "attn_layer_period": 8}, "recurrent or hybrid"),
        (
            {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]},
            "linear_attention",
        ),
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, "recurrent or hybrid.*conv"),
        ({"model_type": "gemma2", "sliding_window": 4096}, "sliding-window"),
        ({"model_type": "t5"}, "no causal decoder of model_type 't5'"),
        ({}, "no causal decoder of model_type None"),
        (LLAMA_3 | {"quantization_config": {"quant_method": "awq"}}, "quantized.*awq"),
        (LLAMA_3 | {"rope_scaling": {"type": "dynamic", "factor": 2}}, "rotary embedding 'dynamic'"),
        (LLAMA_3 | {"rope_parameters": {"rope_type": "longrope"}}, "rotary embedding 'longrope'"),
    ],
)
def test_others_are_refused_with_the_reason(tmp_path: Path, config: dict, reason: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelsError, match=reason) as caught:
        check_servable(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_missing_or_broken_config_is_named(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelsError, match=r"config\.json"):
        check_servable(tmp_path)


def test_exit_codes() -> None:
    assert ModelsError("x").exit_code == 2
    mismatch = HashMismatchError("a.whl", "00", "ff")
    assert mismatch.exit_code == 1
    assert str(mismatch) == "a.whl: sha256 is ff, expected 00; refused"

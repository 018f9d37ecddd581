"""What the decode path can run, told from a model folder before any weight is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gateway.config import ConfigError
from gateway.family import LEAN

ROTARY = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings that depend on the position alone; others change with the length of the text."""

_RECURRENT_KEYS = (
    "attn_layer_period",
    "conv_L_cache",
    "conv_kernel",
    "hybrid_override_pattern",
    "linear_conv_kernel_dim",
    "lru_width",
    "mamba_d_state",
    "ssm_cfg",
    "state_size",
)


class ModelsError(ConfigError):
    """A model that cannot be fetched or served; the message is one line. exit_code: what the CLI returns."""

    exit_code = 2


class HashMismatchError(ModelsError):
    """A file is not what its recorded sha256 says."""

    exit_code = 1

    def __init__(self, name: str, expected: str, actual: str) -> None:
        super().__init__(f"{name}: sha256 is {actual}, expected {expected}; refused")


def check_servable(folder: Path) -> None:
    """Raise ModelsError, with the reason, unless the model in a Hugging Face folder can be decoded here."""
    config = read_config(folder)
    reason = reason_against(config)
    if reason is not None:
        raise ModelsError(f"{folder}: cannot be served: {reason}")


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json; ModelsError where it is missing or not a JSON object."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelsError(f"{folder}: no readable config.json ({error.strerror})") from error
    except ValueError as error:
        raise ModelsError(f"{folder / 'config.json'}: not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ModelsError(f"{folder / 'config.json'}: not a JSON object")
    return config


def reason_against(config: Mapping[str, Any]) -> str | None:
    """Why a model with this config.json cannot be served, or None.

    What the config of a family outside LEAN does not tell, its self-check at load does (hf_decoder.py).
    """
    family = config.get("model_type")
    kinds = set(config.get("layer_types") or ())
    sliding = sorted(k for k in kinds if "sliding" in k or "chunked" in k)
    other = sorted(kinds - {"full_attention", *sliding})
    recurrent = [k for k in _RECURRENT_KEYS if config.get(k)]
    if other or (recurrent and family not in LEAN):
        named = f"layer_types {other[0]}" if other else f"config key {recurrent[0]}"
        return f"recurrent or hybrid layers ({named}); dropping drafted tokens is not tested on them"
    if sliding or _slides(config):
        return "sliding-window attention is active; dropping drafted tokens is not tested on it"
    if family not in LEAN and not _is_causal_decoder(family):
        return f"transformers knows no causal decoder of model_type {family!r}"
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        return f"its weights are quantized ({method}); use an unquantized checkpoint or a GGUF file"
    kind = rotary_kind(config)
    if kind not in ROTARY:
        return f"rotary embedding {kind!r} is not supported (supported: {', '.join(sorted(ROTARY))})"
    return None


def rotary_kind(config: Mapping[str, Any]) -> str:
    """Name of the rotary embedding's variant."""
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return str(rotary.get("rope_type", rotary.get("type", "default")))


def _is_causal_decoder(family: Any) -> bool:
    # Takes seconds to import, and is only needed for families that we do not know.
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def _slides(config: Mapping[str, Any]) -> bool:
    """Whether some layer looks back only sliding_window tokens. Qwen models carry the number unused."""
    if config.get("sliding_window") is None:
        return False
    if config.get("model_type") in ("qwen2", "qwen3"):
        layers = config.get("num_hidden_layers", 0)
        return bool(config.get("use_sliding_window")) and config.get("max_window_layers", 0) < layers
    return True

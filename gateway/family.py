"""Which model families our own forward knows, told from a config alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LEAN = frozenset({"gemma", "llama", "mistral", "qwen2", "qwen3"})
"""Values of model_type that our own forward knows; other causal decoders run Hugging Face's."""


def reason_for_fallback(config: Mapping[str, Any]) -> str | None:
    """Why a servable model runs Hugging Face's forward instead of ours, or None."""
    family = config.get("model_type")
    if family not in LEAN:
        return f"model_type {family}"
    if config.get("mlp_bias"):
        return "mlp_bias"
    if config.get("attention_bias") and family != "qwen2":
        return "attention_bias"
    # Gemma's early configs say "gelu" and mean the tanh approximation; transformers reads them so too.
    known = ("gelu", "gelu_pytorch_tanh") if family == "gemma" else ("silu",)
    if config.get("hidden_act", known[0]) not in known:
        return f"hidden_act {config['hidden_act']}"
    if config.get("use_bidirectional_attention"):
        return "use_bidirectional_attention"
    return None

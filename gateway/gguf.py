"""From a GGUF file to a Hugging Face folder: config, bfloat16 safetensors, tokenizer.

Weights are unpacked a few rows at a time by the `gguf` package, so the memory needed is one output file's.
transformers' own GGUF loader needs accelerate, keeps all of it in memory as float32, drops Qwen's Unicode
normalisation and counts padding rows as tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from safetensors.torch import save_file
from transformers import GenerationConfig, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from gateway.gguf_text import end_ids, tokenizer_of
from gateway.progress import progress, say
from gateway.servable import ModelsError

FILE_BYTES = 2 * 2**30
"""Most bytes of weights in one safetensors file."""

CHUNK_WEIGHTS = 4 * 2**20
"""Weights unpacked at a time."""

CONFIGS: Mapping[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
"""general.architecture -> config class."""

SLOWDOWN = "rope_freqs.weight"
"""[head size / 2]: what Llama 3.1 and later divide each rotary frequency by."""

LLAMA3_ROTARY = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The published constants of Llama 3.1 to 3.3; GGUF keeps only what follows from them."""

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(file: Path, folder: Path, label: str) -> None:
    """Write the model in `file` into the empty directory `folder`; ModelsError where a part is not known.

    label names the model on the progress bar.
    """
    say(f"{label}: reading {file.name}")
    try:
        reader = gguf.GGUFReader(file)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ModelsError(f"{file}: not a readable GGUF file ({error})") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    slowdown = next((np.array(t.data) for t in reader.tensors if t.name == SLOWDOWN), None)
    tensors = [t for t in reader.tensors if t.name != SLOWDOWN]
    config = _config(fields, {t.name: tuple(int(n) for n in t.shape) for t in tensors}, slowdown)
    tokenizer = tokenizer_of(fields, config.max_position_embeddings)
    ends = end_ids(fields)
    config.eos_token_id, config.bos_token_id = ends[0] if ends else None, tokenizer.bos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    _write_weights(tensors, config, folder, label)
    config.save_pretrained(folder)
    GenerationConfig(
        eos_token_id=ends or None, bos_token_id=config.bos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _config(
    fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], slowdown: np.ndarray | None
) -> PretrainedConfig:
    arch = fields.get("general.architecture", "")
    if arch not in CONFIGS:
        raise ModelsError(
            f"GGUF architecture {arch!r} is not supported (supported: {', '.join(sorted(CONFIGS))})"
        )

    def value(key: str, default: Any = None) -> Any:
        found = fields.get(f"{arch}.{key}", default)
        if found is None:
            raise ModelsError(f"GGUF file lacks {arch}.{key}")
        return found

    if value("expert_count", 0):
        raise ModelsError(f"GGUF: {arch}.expert_count is set; mixtures of experts are not supported")
    if value("attention.sliding_window", 0):
        raise ModelsError(
            f"GGUF: {arch}.attention.sliding_window is set; sliding-window attention is not supported"
        )
    if value("rope.scaling.type", "none") != "none":
        raise ModelsError(
            f"GGUF: {arch}.rope.scaling.type is set; name the model's Hugging Face folder or hub id instead"
        )
    heads, hidden = value("attention.head_count"), value("embedding_length")
    kv_heads = value("attention.head_count_kv", heads)
    if not (isinstance(heads, int) and isinstance(kv_heads, int)):
        raise ModelsError("GGUF: layers with different numbers of heads are not supported")
    head_dim = value("attention.key_length", hidden // heads)
    if value("rope.dimension_count", head_dim) != head_dim:
        raise ModelsError(f"GGUF: {arch}.rope.dimension_count differs from the head size; not supported")
    theta = float(value("rope.freq_base", 10000.0))
    settings: dict[str, Any] = {
        "architectures": [CONFIGS[arch].__name__.replace("Config", "ForCausalLM")],
        "vocab_size": shapes["token_embd.weight"][1],
        "hidden_size": hidden,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": value("context_length"),
        # Stored as float32: its shortest decimal form is the number that was meant (1e-06).
        "rms_norm_eps": float(str(np.float32(value("attention.layer_norm_rms_epsilon")))),
        "rope_parameters": _rotary(theta, head_dim, slowdown),
        "tie_word_embeddings": "output.weight" not in shapes,
        "dtype": "bfloat16",
    }
    # Qwen2's config knows no head size of its own; the others default to hidden_size / heads.
    if arch != "qwen2":
        settings["head_dim"] = head_dim
    return CONFIGS[arch](**settings)


def _rotary(theta: float, head_dim: int, slowdown: np.ndarray | None) -> dict[str, Any]:
    """Hugging Face's rope_parameters; a slowdown must be the one that Llama 3's rule gives."""
    if slowdown is None:
        return {"rope_type": "default", "rope_theta": theta}
    factor = float(slowdown.max())
    low, high, trained = LLAMA3_ROTARY.values()
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    share = np.clip((trained / wavelength - low) / (high - low), 0.0, 1.0)
    if not np.allclose(slowdown, 1 / ((1 - share) / factor + share), rtol=1e-3):
        raise ModelsError(
            f"GGUF: {SLOWDOWN} is not Llama 3's; name the Hugging Face folder or hub id instead"
        )
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **LLAMA3_ROTARY}


def _write_weights(tensors: list[Any], config: PretrainedConfig, folder: Path, label: str) -> None:
    """Files of at most FILE_BYTES each, with Hugging Face's index where there are several."""
    files: list[list[Any]] = [[]]
    room = FILE_BYTES
    for tensor in tensors:
        size = 2 * int(tensor.n_elements)
        if files[-1] and size > room:
            files.append([])
            room = FILE_BYTES
        files[-1].append(tensor)
        room -= size
    total = sum(int(t.n_elements) for t in tensors)
    where: dict[str, str] = {}
    with progress(f"{label}: convert", total, unit="weights") as advance:
        for number, group in enumerate(files, 1):
            name = "model.safetensors"
            if len(files) > 1:
                name = f"model-{number:05}-of-{len(files):05}.safetensors"
            weights = {}
            for tensor in group:
                weights[_name(tensor.name)] = _unpack(tensor, config)
                advance(int(tensor.n_elements))
            save_file(weights, folder / name, metadata={"format": "pt"})
            where |= dict.fromkeys(weights, name)
    if len(files) > 1:
        index = {"metadata": {"total_size": 2 * total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def _name(name: str) -> str:
    """blk.3.attn_q.bias -> model.layers.3.self_attn.q_proj.bias."""
    if name in _WHOLE:
        return _WHOLE[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _IN_LAYER:
        return f"model.layers.{parts[1]}.{_IN_LAYER[parts[2]]}.{parts[3]}"
    raise ModelsError(f"GGUF: tensor {name!r} is not known; the model has a part that is not supported")


def _unpack(tensor: Any, config: PretrainedConfig) -> torch.Tensor:
    """One tensor in bfloat16, rows first, as Hugging Face orders them."""
    shape = tuple(int(n) for n in reversed(tensor.shape))
    rows = shape[0] if len(shape) > 1 else 1
    packed = tensor.data.reshape(rows, -1)
    out = torch.empty(rows, int(tensor.n_elements) // rows, dtype=torch.bfloat16)
    for start, stop in _chunks(rows, max(1, CHUNK_WEIGHTS // out.shape[1])):
        numbers = dequantize(packed[start:stop], tensor.tensor_type)
        out[start:stop] = torch.from_numpy(np.array(numbers, dtype=np.float32)).view(stop - start, -1)
    out = out.view(shape)
    if config.model_type == "llama" and tensor.name.split(".")[-2] in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if ".attn_q." in tensor.name else config.num_key_value_heads
        return _halves(out, heads)
    return out


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF's Llama keeps the two numbers of each rotary pair side by side, Hugging Face in two halves."""
    pairs = weight.view(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()


def _chunks(length: int, step: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, step):
        yield start, min(start + step, length)

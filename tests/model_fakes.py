"""Tiny GGUF files and data-only wheels, written as their specifications say."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from gateway.fetch import Source, Wheel
from gateway.tiny import _byte_stand_ins

MERGES = ["h e", "l l", "he ll", "Ġ t", "o Ġ"]
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 272,
    "rms_norm_eps": 1e-6,
}

HF_TO_GGUF = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def vocabulary() -> list[str]:
    """256 byte characters, one token for each merge, then the control tokens."""
    return [*_byte_stand_ins(), *(m.replace(" ", "") for m in MERGES), *CONTROL_TOKENS]


def hf_model(family: str, tied: bool = False, **settings: object) -> torch.nn.Module:
    """A random model whose weights are exact in bfloat16, so that conversion loses nothing."""
    torch.manual_seed(0)
    config, kind = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[family]
    model = kind(config(**{"rope_theta": 5e5, **SHAPE, **settings}, tie_word_embeddings=tied)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.1 if p.ndim > 1 else 0.5)
            p.copy_(p.bfloat16().float())
    return model


def llama_cpp_permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection as llama.cpp stores Llama's: rotary pairs side by side."""
    rows = weight.shape[0] // heads
    order = [
        h * rows + i + half * rows // 2 for h in range(heads) for i in range(rows // 2) for half in (0, 1)
    ]
    return weight[order]


def write_gguf(
    path: Path,
    model: torch.nn.Module,
    *,
    extra: dict[str, int | str] | None = None,
    pre: str = "qwen2",
    quantize: tuple[str, ...] = (),
    more_tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """model as a GGUF file; tensors whose name holds one of `quantize` are packed as Q8_0."""
    config = model.config
    arch = config.model_type
    out = gguf.GGUFWriter(path, arch)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_rope_freq_base(5e5)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    names = vocabulary()
    types = [1] * (len(names) - 3) + [3] * 3
    padding = [f"[PAD{i}]" for i in range(len(names), config.vocab_size)]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre(pre)
    out.add_token_list(names + padding)
    out.add_token_types(types + [5] * len(padding))
    out.add_token_merges(MERGES)
    out.add_eos_token_id(names.index("<|im_end|>"))
    out.add_bos_token_id(names.index("<|endoftext|>"))
    out.add_pad_token_id(names.index("<|endoftext|>"))
    out.add_add_bos_token(False)
    out.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    for key, value in (extra or {}).items():
        (out.add_string if isinstance(value, str) else out.add_uint32)(key, value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy().astype(np.float32)
        where = _gguf_name(name)
        if arch == "llama" and ("attn_q." in where or "attn_k." in where):
            heads = config.num_attention_heads if "attn_q." in where else config.num_key_value_heads
            array = llama_cpp_permute(array, heads)
        if any(q in where for q in quantize):
            kind = gguf.GGMLQuantizationType.Q8_0
            out.add_tensor(where, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            out.add_tensor(where, array)
    for name, array in (more_tensors or {}).items():
        out.add_tensor(name, array)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def _gguf_name(name: str) -> str:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    _, _, layer, *part, kind = name.split(".")
    return f"blk.{layer}.{HF_TO_GGUF['.'.join(part)]}.{kind}"


def write_wheel(folder: Path, package: str, parts: dict[int, bytes]) -> Path:
    """A data-only wheel (PEP 427), version 1.0, with data/partNN.bin members and code that must not run."""
    module = package.replace("-", "_")
    path = folder / f"{module}-1.0-py3-none-any.whl"
    info = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{module}/__init__.py", "raise SystemExit('this code must never run')\n")
        for number, data in parts.items():
            archive.writestr(f"{module}/data/part{number:02}.bin", data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def split_into_wheels(folder: Path, name: str, data: bytes, count: int) -> Source:
    """data cut into `count` wheels of one part each, and the source that describes them."""
    step = -(-len(data) // count)
    wheels = []
    for i in range(count):
        path = write_wheel(folder, f"{name}-part{i + 1}", {i + 1: data[i * step : (i + 1) * step]})
        wheels.append(Wheel(f"{name}-part{i + 1}", "1.0", hashlib.sha256(path.read_bytes()).hexdigest()))
    return Source(
        name=name,
        gguf_sha256=hashlib.sha256(data).hexdigest(),
        size=len(data),
        format="GGUF F32",
        licence="Apache-2.0",
        upstream="someone/model-GGUF",
        wheels=tuple(wheels),
    )

"""The `tiny` preset: a seeded random Llama as the large model; smaller ones are its weights plus noise.

Nothing is downloaded or trained. The tokenizer has one token per byte, so any UTF-8 goes round unchanged.
The sizes and scales below are chosen so that the pair behaves like a real one where routing is concerned:
see tests/test_tiny.py for the bands.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
END_OF_TEXT_ID, IM_START_ID, IM_END_ID = 256, 257, 258
VOCAB_SIZE = 259

HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE, POSITIONS = 128, 3, 4, 2, 256, 4096

NOISE: Mapping[str, float] = {"small": 0.022, "middle": 0.011}
"""Model name -> standard deviation of its noise, as a share of each weight matrix's own."""

QK_GAIN = 3.0
"""Sharpness of attention: high enough that greedy text wanders on, low enough that noise does not ruin it."""

HEAD_GAIN = 8.0
"""Standard deviation of the logits, roughly: how peaky the next-token distributions are."""

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + (m['content'] or '') + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build(cache: Path, seed: int = 0, noise: Mapping[str, float] = NOISE) -> Path:
    """The folder under cache that holds `large` and one model folder for each name in noise; built once.

    Its name carries a key of everything that went in, this file's text included, so a changed recipe never
    meets an old build. A half-written build is never seen: the folder appears by one rename.
    """
    recipe = json.dumps([seed, sorted(noise.items())]).encode() + Path(__file__).read_bytes()
    folder = cache / f"tiny-{hashlib.sha256(recipe).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    half = Path(tempfile.mkdtemp(prefix=".tiny-", dir=cache))
    try:
        large = _weights(seed)
        _save(half / "large", large)
        for name, level in noise.items():
            _save(half / name, _noisy(large, level, seed))
        half.chmod(0o755)
        os.rename(half, folder)
    except OSError:
        # Another process may have finished the same build first; its folder is as good as ours.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(half, ignore_errors=True)
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte (id = byte) and three control tokens, in Hugging Face's form."""
    stand_ins = _byte_stand_ins()
    fast = Tokenizer(models.BPE(vocab={c: b for b, c in enumerate(stand_ins)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in (END_OF_TEXT, IM_START, IM_END)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[IM_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def _byte_stand_ins() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def _config() -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=POSITIONS,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=IM_END_ID,
        pad_token_id=END_OF_TEXT_ID,
        dtype="float32",
    )


def _weights(seed: int) -> dict[str, torch.Tensor]:
    """The large model's weights.

    Hidden dimension 0 is the same in every embedding and no layer writes to it, so column 0 of the head
    works as a bias on the logits, which Llama's head does not have by itself.
    """
    rng = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=rng).mul_(gain / columns**0.5)

    def writer(columns: int) -> torch.Tensor:
        out = matrix(HIDDEN, columns)
        out[0] = 0.0
        return out

    kv = HIDDEN // HEADS * KV_HEADS
    embedding = torch.randn(VOCAB_SIZE, HIDDEN, generator=rng)
    embedding[:, 0] = 2.0
    weights = {"model.embed_tokens.weight": embedding}
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        weights |= {
            f"{at}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{at}.self_attn.q_proj.weight": matrix(HIDDEN, HIDDEN, QK_GAIN**0.5),
            f"{at}.self_attn.k_proj.weight": matrix(kv, HIDDEN, QK_GAIN**0.5),
            f"{at}.self_attn.v_proj.weight": matrix(kv, HIDDEN),
            f"{at}.self_attn.o_proj.weight": writer(HIDDEN),
            f"{at}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{at}.mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{at}.mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{at}.mlp.down_proj.weight": writer(INTERMEDIATE),
        }
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    head = matrix(VOCAB_SIZE, HIDDEN, HEAD_GAIN)
    head[:, 0] = _head_bias()
    weights["lm_head.weight"] = head
    return weights


def _head_bias() -> torch.Tensor:
    """[VOCAB_SIZE]: printable ASCII likely, lower-case letters and spaces most, an end now and then."""
    bias = torch.full((VOCAB_SIZE,), -14.0)
    bias[32:127] = -1.0
    for rank, letter in enumerate(b" etaoinshrdlucmfwypvbgkjqxz"):
        bias[letter] = 2.0 - rank / 10
    bias[ord("\n")] = 0.0
    bias[IM_END_ID] = -1.0
    return bias


def _noisy(weights: Mapping[str, torch.Tensor], level: float, seed: int) -> dict[str, torch.Tensor]:
    """Every matrix plus level * its standard deviation * one fixed normal draw; dimension 0 left alone."""
    rng = torch.Generator().manual_seed(seed + 1)
    out = {}
    for name, weight in weights.items():
        out[name] = weight.clone()
        if weight.ndim == 1:
            continue
        draw = torch.randn(weight.shape, generator=rng)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            draw[0] = 0.0
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            draw[:, 0] = 0.0
        out[name] += level * weight[1:, 1:].std() * draw
    return out


def _save(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    folder.mkdir()
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    _config().save_pretrained(folder)
    GenerationConfig(eos_token_id=[IM_END_ID, END_OF_TEXT_ID], pad_token_id=END_OF_TEXT_ID).save_pretrained(
        folder
    )
    byte_tokenizer().save_pretrained(folder)

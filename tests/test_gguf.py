"""A converted GGUF file is the model it was written from: same logits, same tokens."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from model_fakes import MERGES, hf_model, vocabulary, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from gateway import gguf as converter
from gateway.gguf_text import SPLITTINGS
from gateway.servable import ModelsError, check_servable
from gateway.text import Tokenizer

IDS = torch.tensor([[5, 80, 200, 3, 91, 17, 44, 260]])


def converted(tmp_path: Path, model: torch.nn.Module, **options: object) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    converter.convert(write_gguf(tmp_path / "in.gguf", model, **options), folder, "fake")
    return folder


@pytest.mark.parametrize(("family", "tied"), [("qwen2", False), ("qwen2", True), ("llama", False)])
def test_logits_are_the_original_models(tmp_path: Path, family: str, tied: bool) -> None:
    model = hf_model(family, tied)
    folder = converted(tmp_path, model)
    check_servable(folder)
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert again.config.tie_word_embeddings == tied
    with torch.no_grad():
        torch.testing.assert_close(again(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)


def test_llama_3s_slowed_rotary_is_recognised(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_type": "llama3", "rope_theta": 5e5}
    model = hf_model("llama", rope_parameters=scaling, head_dim=32)
    plain = 5e5 ** -(torch.arange(0, 32, 2) / 32)
    slowdown = (plain / model.model.rotary_emb.inv_freq).numpy()
    assert 1 < len(set(slowdown.round(3))) < 16
    folder = converted(
        tmp_path,
        model,
        extra={"llama.attention.key_length": 32},
        more_tensors={"rope_freqs.weight": slowdown.astype(np.float32)},
    )
    check_servable(folder)
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(again.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    with torch.no_grad():
        torch.testing.assert_close(again(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)


def test_several_files_load_like_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converter, "FILE_BYTES", 60_000)
    monkeypatch.setattr(converter, "CHUNK_WEIGHTS", 1000)
    model = hf_model("qwen2")
    folder = converted(tmp_path, model)
    assert len(list(folder.glob("*.safetensors"))) > 2
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


def test_packed_weights_are_unpacked(tmp_path: Path) -> None:
    model = hf_model("qwen2")
    folder = converted(tmp_path, model, quantize=("ffn_",))
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    weight = model.model.layers[1].mlp.down_proj.weight.detach().numpy()
    expected = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)).bfloat16()
    assert torch.equal(expected.float(), again.model.layers[1].mlp.down_proj.weight)
    assert torch.equal(model.lm_head.weight, again.lm_head.weight)


TEXTS = ["hello the 12345", "I'll don't WE'RE", "a\n\n  b\t c\r\n", "x=1;y==2//z", "e\u0301 你好 👍🏽", " "]


def test_tokens_are_upstream_qwens(tmp_path: Path) -> None:
    folder = converted(tmp_path, hf_model("qwen2"))
    names = vocabulary()
    plain = {n: i for i, n in enumerate(names[:-3])}
    upstream = Qwen2Tokenizer(vocab=plain, merges=[tuple(m.split()) for m in MERGES])
    ours = Tokenizer.load(folder)
    hf = AutoTokenizer.from_pretrained(folder)
    assert ours.vocab_size == len(names)
    for text in TEXTS:
        assert ours.encode(text) == upstream.encode(text) == hf.encode(text), text
    splits = [t.backend_tokenizer.pre_tokenizer.pre_tokenize_str("Don't pay 123 x") for t in (hf, upstream)]
    assert splits[0] == splits[1]
    assert [s for s, _ in splits[0]] == ["Don", "'t", "Ġpay", "Ġ", "1", "2", "3", "Ġx"]


def test_ends_and_template_are_carried_over(tmp_path: Path) -> None:
    folder = converted(tmp_path, hf_model("qwen2"))
    end_of_text, _, im_end = range(261, 264)
    ours = Tokenizer.load(folder)
    assert ours.eos_ids == {end_of_text, im_end}
    saved = json.loads((folder / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [im_end, end_of_text]
    assert ours.special_ids == {261, 262, 263}
    assert ours.chat([{"role": "user", "content": "he"}]) == [262, 256, 263]


def test_llama_3_splits_digits_by_threes() -> None:
    assert SPLITTINGS["llama-bpe"].pattern == TikTokenConverter().pattern


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"extra": {"qwen2.attention.sliding_window": 4096}}, "sliding_window"),
        ({"extra": {"qwen2.expert_count": 8}}, "experts"),
        ({"extra": {"qwen2.rope.scaling.type": "yarn"}}, r"rope\.scaling\.type"),
        ({"extra": {"qwen2.rope.dimension_count": 8}}, "dimension_count"),
        ({"more_tensors": {"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)}}, "is not Llama 3's"),
        ({"more_tensors": {"blk.0.ssm_a": np.ones(4, dtype=np.float32)}}, r"blk\.0\.ssm_a"),
        ({"pre": "deepseek-coder"}, "pre-tokenizer 'deepseek-coder'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_unknown_parts_are_refused_by_name(tmp_path: Path, options: dict, reason: str) -> None:
    with pytest.raises(ModelsError, match=reason):
        converted(tmp_path, hf_model("qwen2"), **options)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "not.gguf").write_bytes(b"no" * 100)
    with pytest.raises(ModelsError, match=r"not\.gguf"):
        converter.convert(tmp_path / "not.gguf", tmp_path, "fake")

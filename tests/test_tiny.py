"""The tiny pair loads in plain transformers, builds once, and routes like a real pair."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gateway import tiny
from gateway.text import Tokenizer

# Twelve bytes each, so that one batch needs no padding.
PROMPTS = ["Hello, who r", "def f(x, y):", "SELECT * FRO", "123456789012", "你好世界", "import os\n\nx"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("cache"), noise={"small": 0.022, "middle": 0.01})


def load(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[tuple[int, torch.Tensor]]:
    """Prompt length and ids [1, tokens] of each prompt with the large model's own greedy answer."""
    tokenizer = Tokenizer.load(folder / "large")
    ids = torch.tensor([tokenizer.chat([{"role": "user", "content": p}]) for p in PROMPTS])
    with torch.no_grad():
        batch = load(folder / "large").generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=128, do_sample=False
        )
    out = []
    for row in batch:
        ends = [i for i in range(ids.shape[1], len(row)) if int(row[i]) in tokenizer.eos_ids]
        out.append((ids.shape[1], row[None, : ends[0] + 1 if ends else len(row)]))
    return out


def agreement(folder: Path, name: str, answers: list[tuple[int, torch.Tensor]]) -> dict[str, float]:
    """Shares over all answered positions, along the large model's own greedy text."""
    large, small = load(folder / "large"), load(folder / name)
    same, kept = [], []
    for start, ids in answers:
        with torch.no_grad():
            a = large(ids).logits[0, start - 1 : -1]
            b = small(ids).logits[0, start - 1 : -1]
        same.append(a.argmax(-1) == b.argmax(-1))
        top = b.softmax(-1).topk(2).values
        kept.append(top[:, 0] - top[:, 1] > 0.5)
    agrees, confident = torch.cat(same).float(), torch.cat(kept)
    return {
        "agree": agrees.mean().item(),
        "confident": confident.float().mean().item(),
        "agree_confident": agrees[confident].mean().item(),
    }


def test_small_agrees_like_a_real_small_model(folder: Path, answers: list) -> None:
    figures = agreement(folder, "small", answers)
    assert 0.80 <= figures["agree"] <= 0.90
    assert 0.50 <= figures["confident"] <= 0.75
    assert 0.95 <= figures["agree_confident"] < 1.0


def test_less_noise_agrees_more(folder: Path, answers: list) -> None:
    small, middle = (agreement(folder, name, answers)["agree"] for name in ("small", "middle"))
    assert small < middle < 1.0


def test_greedy_text_is_printable_and_does_not_loop(answers: list) -> None:
    texts = [ids[0, start:].tolist() for start, ids in answers]
    flat = [t for text in texts for t in text]
    assert sum(32 <= t < 127 or t == 10 for t in flat) / len(flat) > 0.95
    ngrams = [tuple(text[i : i + 8]) for text in texts for i in range(len(text) - 7)]
    assert len(set(ngrams)) / len(ngrams) > 0.9


def test_an_end_is_rare_but_possible(folder: Path, answers: list) -> None:
    assert any(ids.shape[1] - start == 128 for start, ids in answers)
    large = load(folder / "large")
    with torch.no_grad():
        chance = torch.cat([large(ids).logits[0, s - 1 : -1].softmax(-1)[:, 258] for s, ids in answers])
    assert 1e-4 < chance.mean().item() < 0.02


def test_build_is_deterministic_and_done_once(folder: Path, tmp_path: Path) -> None:
    again = tiny.build(tmp_path, noise={"small": 0.022, "middle": 0.01})
    assert folder.name == again.name
    for name in ("large", "small"):
        files = [p / name / "model.safetensors" for p in (folder, again)]
        assert files[0].read_bytes() == files[1].read_bytes()
    stamp = (again / "large" / "config.json").stat().st_mtime_ns
    assert again == tiny.build(tmp_path, noise={"small": 0.022, "middle": 0.01})
    assert stamp == (again / "large" / "config.json").stat().st_mtime_ns


def test_other_seeds_and_noise_build_elsewhere(tmp_path: Path) -> None:
    folders = {tiny.build(tmp_path), tiny.build(tmp_path, seed=1), tiny.build(tmp_path, noise={"small": 0.1})}
    assert len(folders) == 3
    assert folders == set(tmp_path.iterdir())


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tiny, "_save", full_disk)
    with pytest.raises(OSError, match="No space"):
        tiny.build(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_plain_transformers_reads_the_tokenizer(folder: Path) -> None:
    hf = AutoTokenizer.from_pretrained(folder / "small")
    assert (
        hf.apply_chat_template(
            [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
        )
        == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert {256, 258} == Tokenizer.load(folder / "small").eos_ids

"""From a config to a loaded pair, for a family whose forward is Hugging Face's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs
from transformers import BertConfig, BertLMHeadModel, GPT2Config, GPT2LMHeadModel

from gateway import kernels
from gateway.config import Config, ConfigError, load_config
from gateway.core import Sampling, Tier
from gateway.loading import load_pair, quantization
from gateway.policy import Policy
from gateway.request import Request
from gateway.scheduler import Scheduler
from gateway.tiny import VOCAB_SIZE, byte_tokenizer

POSITIONS = 96


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A large GPT-2 and a small one: the same weights, a little noisier."""
    root = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": None}
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB_SIZE, n_positions=POSITIONS, n_embd=32, n_layer=2, n_head=4, **ends)
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn(weight.shape))
        found = {}
        for name in ("large", "small"):
            found[name] = root / name
            model.save_pretrained(found[name])
            byte_tokenizer().save_pretrained(found[name])
            for weight in model.parameters():
                weight.add_(0.01 * torch.randn(weight.shape))
    return found


def _config(folders: dict[str, Path], **keys: object) -> Config:
    named = {f"models.{name}": str(folder) for name, folder in folders.items()}
    sizes = {"engine.max_model_len": POSITIONS, "engine.max_rows": 4, "models.dtype": "float32"}
    return load_config(None, {}, {**named, **sizes, **keys})


def test_a_gpt2_pair_decodes_as_generate_does(folders: dict[str, Path]) -> None:
    with capture_logs() as logs:
        loaded = load_pair(_config(folders), timed=False)
    reasons = [line["reason"] for line in logs if line["event"] == "hugging_face_forward"]
    assert reasons == ["model_type gpt2"] * 2
    engine = loaded.engine(Scheduler(0.0, 64), 4, POSITIONS)
    prompts = {"a": [104, 105], "b": [1, 2, 3, 4, 5], "c": list(range(40, 60))}
    for name, prompt in prompts.items():
        sampling = Sampling(max_tokens=30, seed=0, temperature=0.0, ignore_eos=True)
        policy = Policy(protect_first=2, threshold=0.0, draft_length=4)
        engine.add(Request(name, 0, tuple(prompt), sampling, policy, "stable", 0.0))
    answers: dict[str, list[int]] = {name: [] for name in prompts}
    tiers = set()
    while not engine.idle:
        for delta in engine.tick().deltas:
            answers[delta.request_id] += [step.token_id for step in delta.steps]
            tiers |= {step.tier for step in delta.steps}
    hf = GPT2LMHeadModel.from_pretrained(folders["large"]).eval()
    for name, prompt in prompts.items():
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = hf.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False, pad_token_id=0)
        assert answers[name] == out[0, len(prompt) :].tolist()
    assert len(tiers) == 3  # drafts of both kinds stood, so caches were rolled back on the way


def test_a_text_longer_than_the_model_has_positions_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=rf"97 is beyond models\.small's {POSITIONS} positions"):
        load_pair(_config(folders, **{"engine.max_model_len": POSITIONS + 1}), timed=False)


@pytest.mark.parametrize(
    ("models", "small", "large"),
    [
        ({}, "int4", "int8"),
        ({"small": "here", "large": "there"}, "int8", "int8"),
        ({"preset": "tiny"}, "none", "none"),
        ({"device": "cuda"}, "none", "none"),
        ({"small_quantize": "int8", "large_quantize": "int4"}, "int8", "int4"),
    ],
)
def test_weights_are_by_default_as_small_as_was_measured_to_be_safe(
    models: dict[str, str], small: str, large: str
) -> None:
    config = load_config(None, {}, {f"models.{key}": value for key, value in models.items()})
    chosen = quantization(config, "bfloat16", dict.fromkeys((Tier.SMALL, Tier.LARGE), True))
    able = kernels.available() or {small, large} == {"none"}
    assert chosen == ({Tier.SMALL: small, Tier.LARGE: large} if able else dict.fromkeys(chosen, "none"))


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantizing_is_refused_where_the_forward_is_hugging_faces(
    quantize: str, folders: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError, match=rf"models\.large_quantize: {quantize} needs a family"):
        load_pair(_config(folders, **{"models.large_quantize": quantize}), timed=False)


def test_a_model_that_fails_its_self_check_is_refused_in_one_line(tmp_path: Path) -> None:
    torch.manual_seed(0)
    bert = BertLMHeadModel(
        BertConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=POSITIONS,
        )
    )
    bert.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"models\.small: .* cannot be served: .* not causal") as caught:
        load_pair(_config({"small": tmp_path, "large": tmp_path}), timed=False)
    assert "\n" not in str(caught.value)

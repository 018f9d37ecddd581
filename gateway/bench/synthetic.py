"""Two models of real shapes and no real weights, whose agreement is scripted: speed without a download.

Layers are random and write next to nothing into the residual stream, so a token's logits are those of its own
embedding, and the output head says which token follows which. In the large model the followers go round a
cycle; in the small one a seeded coin has turned some of them away. Every pass costs what the shape costs; the
text means nothing.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config
from transformers.initialization import no_init_weights

from gateway.bench.table import LEAST_PROMPTS
from gateway.bench.workloads import Workload
from gateway.config import Config, ConfigError
from gateway.core import Tier
from gateway.loading import Loaded, check_device, hold, numerics, quantization
from gateway.models import CausalLM
from gateway.request import Served
from gateway.text import Tokenizer
from gateway.tiny import IM_END_ID, byte_tokenizer

SHAPES = {
    # hidden, intermediate, layers, heads, KV heads, vocabulary: those of Qwen2.5, and a tiny one for tests.
    "tiny": (128, 256, 2, 4, 2, 512),
    "0.5B": (896, 4864, 24, 14, 2, 151936),
    "1.5B": (1536, 8960, 28, 12, 2, 151936),
    "3B": (2048, 11008, 36, 16, 2, 151936),
    "7B": (3584, 18944, 28, 28, 4, 152064),
    "14B": (5120, 13824, 48, 40, 8, 152064),
    "32B": (5120, 27648, 64, 40, 8, 152064),
}
CYCLE, STRIDE = 256, 97
"""Tokens that are ever written, and how far apart one and its follower are; they share no factor."""

CONFIDENCE = 40.0
"""Logit of the follower; the others' are a fraction of it."""

QUIET = 1e-3
"""Standard deviation of the layers' weights: large enough to be no special case, too small to steer."""


def parse(text: str) -> dict[Tier, str]:
    """SMALL:LARGE as shapes; ConfigError for others."""
    names = text.split(":")
    if len(names) != 2 or any(name not in SHAPES for name in names):
        raise ConfigError(f"--synthetic: {text!r} is not SMALL:LARGE of {', '.join(SHAPES)}")
    return dict(zip((Tier.SMALL, Tier.LARGE), names, strict=True))


def followers(tier: Tier, agreement: float, seed: int) -> list[int]:
    """Which token follows each of the CYCLE tokens. The small model's differ from the large one's for a share
    of 1 - agreement of them, drawn by the seed."""
    follows = [(token + STRIDE) % CYCLE for token in range(CYCLE)]
    if tier is Tier.SMALL:
        rng = random.Random(seed)
        for token in rng.sample(range(CYCLE), round((1 - agreement) * CYCLE)):
            follows[token] = (follows[token] + rng.randrange(1, CYCLE)) % CYCLE
    return follows


@torch.no_grad()
def model(shape: str, follows: list[int], device: str, dtype: torch.dtype) -> Any:
    """A Hugging Face Qwen2 model of that shape which writes follows[t] behind t."""
    hidden, intermediate, layers, heads, kv_heads, vocab_size = SHAPES[shape]
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=False,
    )
    with torch.device(device), no_init_weights():
        hf: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator(device).manual_seed(0)
    for name, weight in hf.named_parameters():
        if "norm" in name:
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, QUIET, generator=generator)
    embed = hf.model.embed_tokens.weight
    embed.normal_(0.0, 1.0, generator=generator)
    for token, follower in enumerate(follows):
        # After the last norm a token's vector is near its embedding, whose square is near `hidden`.
        hf.lm_head.weight[follower] += embed[token] * (CONFIDENCE / hidden)
    return hf.eval()


def load(config: Config, shapes: Mapping[Tier, str], agreement: float, seed: int) -> Loaded:
    """The pair, held and timed as a real one would be."""
    check_device(config)
    dtype = config.models.dtype or "bfloat16"
    quantize = quantization(config, dtype, dict.fromkeys(shapes, True))
    models = {}
    for tier, shape in shapes.items():
        follows = followers(tier, agreement, seed)
        hf = model(shape, follows, config.models.device, getattr(torch, dtype))
        models[tier] = CausalLM.of(hf, quantize[tier])
    names = {tier: f"synthetic-{shape}" for tier, shape in shapes.items()}
    served = Served(
        small_model=names[Tier.SMALL],
        large_model=names[Tier.LARGE],
        small_hash=names[Tier.SMALL],
        large_hash=names[Tier.LARGE],
        numerics=numerics(config, dtype, quantize),
        version=version("tokentape"),
    )
    return hold(config, models, Tokenizer(tokenizer(), [IM_END_ID]), served, timed=True)


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes; a chat is its messages' bare text, so that prompts end and rows begin with different tokens."""
    made = byte_tokenizer()
    made.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return made


def workload(num_rows: int, max_tokens: int) -> Workload:
    """At least num_rows prompts of 128 letters each."""
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    prompts = tuple("".join(rng.choices(letters, k=128)) for _ in range(max(num_rows, LEAST_PROMPTS)))
    return Workload("synthetic", prompts, max_tokens)

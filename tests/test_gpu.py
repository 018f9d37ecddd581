"""The CUDA path on a CUDA device: graphs give what the CPU gives. `make gpu-check` runs these."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import ask_for, decode
from test_models import CONFIGS, Pair

from gateway.ahead import Ahead
from gateway.config import load_config
from gateway.core import Mode, Tier
from gateway.loading import Loaded, load_pair
from gateway.policy import Policy
from gateway.scheduler import Scheduler
from gateway.static_decoder import StaticDecoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def on_gpu(hf: Any) -> StaticDecoder:
    return StaticDecoder(hf.to("cuda"))


@pytest.mark.parametrize("family", CONFIGS)
def test_graphs_give_the_logits_of_transformers(family: str) -> None:
    pair = Pair(CONFIGS[family], 32, on_gpu)
    pair.check([(0, 0, 20, 1), (1, 0, 50, 0), (2, 0, 33, 1)])
    for _ in range(2):  # the first time captures, the second replays
        pair.check([(0, 20, 21, 1), (3, 0, 30, 2), (1, 50, 80, 1), (2, 33, 39, 6)])
        pair.check([(2, 39, 40, 1), (0, 21, 22, 1), (3, 30, 31, 1), (1, 80, 81, 1)])
    # Other rows, positions and blocks through the graphs that are there.
    pair.check([(3, 31, 32, 1), (1, 81, 82, 1), (2, 40, 41, 1), (0, 22, 23, 1)])


def test_replaying_a_graph_is_running_it_without_one() -> None:
    pair = Pair(CONFIGS["qwen2"], 32, on_gpu)
    feeds = [pair.feed(0, 0, 9, 3), pair.feed(1, 0, 2, 1)]
    pair.ours.forward(feeds)
    replayed = pair.ours.forward(feeds)
    decoder = pair.ours.decoder
    assert isinstance(decoder, StaticDecoder)
    assert len(decoder.graphs) == 1
    flat = super(StaticDecoder, decoder).__call__(feeds, pair.ours.cache)
    torch.testing.assert_close(replayed.logits, flat.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(replayed.attn_entropy, flat.attn_entropy, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def tiny() -> Loaded:
    keys = {"models.preset": "tiny", "models.device": "cuda", "engine.max_model_len": 256}
    return load_pair(load_config(None, {}, {**keys, "engine.max_rows": 16}), timed=False)


def test_exact_is_large_only_with_drafts_ahead(tiny: Loaded) -> None:
    assert isinstance(tiny.tiers()[Tier.SMALL], Ahead)

    def answers(policy: Policy) -> list[list[int]]:
        engine = tiny.engine(Scheduler(0.0, 64), 16, 256)
        asked = [
            ask_for(f"r{i}", (65 + i, 66), policy=policy, max_tokens=60, ignore_eos=True, temperature=t)
            for i, t in enumerate([0.0] * 6 + [0.8] * 3)
        ]
        got = decode(engine, asked)
        return [got[request.id, 0].tokens for request in asked]

    alone = answers(Policy(mode=Mode.LARGE_ONLY))
    assert answers(Policy(protect_first=0)) == alone
    assert answers(Policy(protect_first=0, threshold=0.0, draft_length=16)) == alone

"""Random weights whose text is scripted: they write what the script says and agree as often as it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gateway.bench import floor, synthetic
from gateway.bench.runs import Bench, Setting
from gateway.bench.settings import LARGE_ONLY
from gateway.cli import main
from gateway.config import ConfigError, load_config
from gateway.core import Tier
from gateway.load import CostTable
from gateway.models import CausalLM
from gateway.policy import Policy
from gateway.torch_decoder import TorchDecoder

TINY = {Tier.SMALL: "tiny", Tier.LARGE: "tiny"}


def test_followers_go_round_one_cycle_and_the_small_models_leave_it_as_often_as_asked() -> None:
    large = synthetic.followers(Tier.LARGE, 0.85, 0)
    token, seen = 0, set()
    while token not in seen:
        seen.add(token)
        token = large[token]
    assert len(seen) == len(large) == synthetic.CYCLE
    small = synthetic.followers(Tier.SMALL, 0.85, 0)
    assert sum(a == b for a, b in zip(small, large, strict=True)) == round(0.85 * synthetic.CYCLE)
    assert small == synthetic.followers(Tier.SMALL, 0.85, 0) != synthetic.followers(Tier.SMALL, 0.85, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_writes_its_followers_without_doubt(dtype: torch.dtype) -> None:
    follows = synthetic.followers(Tier.SMALL, 0.5, 3)
    model = synthetic.model("tiny", follows, "cpu", dtype)
    with torch.no_grad():
        p = torch.softmax(model(torch.arange(synthetic.CYCLE)[None]).logits[0].float(), dim=-1)
    assert p.argmax(-1).tolist() == follows
    assert p.max(-1).values.min() > 0.99


@pytest.mark.parametrize("quantize", ["none", None])
def test_acceptance_in_a_run_is_the_scripted_one(
    quantize: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: what a CPU takes by default, int8 where it has a compiler."""
    monkeypatch.setattr("gateway.loading.cache_dir", lambda: tmp_path)
    keys = {"models.small_quantize": quantize, "models.large_quantize": quantize}
    sizes = {"engine.max_model_len": 512, "engine.max_rows": 8}
    config = load_config(None, {}, {**sizes, **{k: v for k, v in keys.items() if v is not None}})
    bench = Bench(synthetic.load(config, TINY, 0.7, 0), 512)
    prompts = synthetic.workload(4, 64).pick(4)
    policy = Policy(lookup=False, protect_first=0, loop_limit=0, draft_length=1)
    found = bench.run(Setting("exact", policy, adapt=False), prompts, 64)
    assert found.acceptance == pytest.approx(_scripted_acceptance([ord(p[-1]) for p in prompts], 64))
    assert found.agreement == 1.0
    assert found.small_share + found.large_share == pytest.approx(1.0)
    assert bench.run(LARGE_ONLY, prompts, 16).large_share == 1.0


def _scripted_acceptance(last_tokens: list[int], max_tokens: int) -> float:
    """Rounds of one draft by the two scripts alone: a right draft stands and brings a bonus token."""
    small, large = (synthetic.followers(tier, 0.7, 0) for tier in (Tier.SMALL, Tier.LARGE))
    drafted = accepted = 0
    for token in last_tokens:
        written = 0
        while written < max_tokens:
            drafted += 1
            if small[token] == large[token]:
                accepted += 1
                written += 1
                token = large[token]
            written += 1
            token = large[token]
    return accepted / drafted


def test_a_pass_reads_every_weight_but_the_embedding() -> None:
    hf = synthetic.model("tiny", synthetic.followers(Tier.LARGE, 1.0, 0), "cpu", torch.bfloat16)
    num = sum(p.numel() for name, p in hf.named_parameters() if "embed" not in name)
    model = CausalLM.of(hf, "none")
    assert isinstance(model.decoder, TorchDecoder)
    assert floor.weight_bytes(model.decoder) == 2 * num
    said = floor.line("large", model, CostTable((1, 2), (10.0, 20.0)))
    assert said is not None
    assert said.startswith("large: a pass of one token 10.00 ms, ")


def test_shapes_are_named_or_refused() -> None:
    assert synthetic.parse("0.5B:7B") == {Tier.SMALL: "0.5B", Tier.LARGE: "7B"}
    for text in ("0.5B", "0.5B:8B", "a:b:c"):
        with pytest.raises(ConfigError, match="--synthetic"):
            synthetic.parse(text)


def test_the_command_labels_its_numbers_synthetic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.loading.cache_dir", lambda: tmp_path)
    file = tmp_path / "bench.json"
    command = "bench --synthetic tiny:tiny --agreement .9 --rows 2 --tokens 12 --repeats 1"
    assert main([*command.split(), "--settings", "routed exact", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("SYNTHETIC: random weights; acceptance scripted at 0.9 by a seeded coin\n")
    assert "synthetic-tiny + synthetic-tiny" in out
    lines = json.loads(file.read_text())["lines"]
    assert [line["setting"] for line in lines] == ["large-only", "routed exact"]
    assert main([*command.split(), "--peers"]) == 2

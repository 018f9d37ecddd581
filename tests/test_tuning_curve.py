"""The curve: against HF forward passes, predicted times by hand, cliff and candidates."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_pair import TinyPair
from transformers import AutoModelForCausalLM

from gateway.config import Config, EngineConfig, ModelsConfig
from gateway.core import Accept, Mode, Tier
from gateway.load import CostTable
from gateway.policy import Policy
from gateway.presets import resolve
from gateway.text import Tokenizer
from gateway.tuning import curve
from gateway.tuning.machine import runner_for
from gateway.tuning.prompts import Prompt
from gateway.tuning.run import Answer, Runner
from gateway.tuning.tasks.task import load_task

COSTS = {
    Tier.SMALL: CostTable((1, 2, 8), (1.0, 1.5, 3.0)),
    Tier.LARGE: CostTable((1, 2, 8), (10.0, 10.0, 13.0)),
}
WORDS = ["river", "stone", "lamp", "music", "winter", "garden", "train", "letter", "market", "window"]


def prompts(num: int) -> list[Prompt]:
    rng = np.random.default_rng(num)
    texts = [" ".join(rng.choice(WORDS, 5)) for _ in range(num)]
    return [Prompt(str(i), "", ({"role": "user", "content": f"{text} {i}"},)) for i, text in enumerate(texts)]


def hf_positions(
    small: Path, large: Path, asked: list[Prompt], answers: dict[str, Answer], tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """gap, agreement and output position of every token of the answers, from Hugging Face forward passes."""
    chosen: dict[Path, list[np.ndarray]] = {}
    gaps: list[float] = []
    for folder in (large, small):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        chosen[folder] = []
        for prompt in asked:
            tokens = answers[prompt.digest].tokens
            ids = torch.tensor([[*prompt.ids(tokenizer), *tokens]])
            with torch.inference_mode():
                p = torch.softmax(model(ids).logits[0, -len(tokens) - 1 : -1], -1)
            chosen[folder].append(p.argmax(-1).numpy())
            if folder == small:
                top = p.topk(2, dim=-1).values
                gaps += (top[:, 0] - top[:, 1]).tolist()
        del model
        gc.collect()
    agrees = np.concatenate(chosen[large]) == np.concatenate(chosen[small])
    positions = np.concatenate([np.arange(len(answers[prompt.digest].tokens)) for prompt in asked])
    return np.array(gaps), agrees, positions


def assert_same_curve(
    points: list[curve.Point], gap: np.ndarray, agree: np.ndarray, behind: np.ndarray
) -> None:
    """Every point's kept share, disagreement and agreement within half a percentage point."""
    assert len(points) == len(curve.GRID)
    for point in points:
        keep = (gap >= point.threshold) & behind
        assert point.kept == pytest.approx(keep.mean(), abs=0.005)
        assert point.disagreement == pytest.approx((keep & ~agree).mean(), abs=0.005)
        if keep.any():
            assert point.agreement == pytest.approx(agree[keep].mean(), abs=0.005)


SHADOW = Policy(mode=Mode.SHADOW, accept=Accept.TRUST, protect_first=3)


def test_the_curve_is_that_of_hf_forward_passes(tiny_pair: TinyPair) -> None:
    asked = prompts(20)
    answers = {one.prompt: one for one in Runner(tiny_pair.engine(), 24).run(asked, SHADOW)}
    points = curve.draw([curve.track(a, SHADOW) for a in answers.values()], SHADOW, COSTS)

    gap, agree, position = hf_positions(
        tiny_pair.folder / "small", tiny_pair.folder / "large", asked, answers, tiny_pair.tokenizer
    )
    assert_same_curve(points, gap, agree, position >= 3)


@pytest.mark.e2e
@pytest.mark.timeout(1200)
def test_so_it_is_for_the_default_pair() -> None:
    """In float32, where our forward and Hugging Face's differ by rounding alone."""
    models = ModelsConfig(dtype="float32", small_quantize="none", large_quantize="none")
    config = Config(models=models, engine=EngineConfig(kv_memory_gib=1.0, max_model_len=512, max_rows=20))
    asked = list(load_task("qa", allow_code_execution=False).prompts[:10])
    asked += list(load_task("summary", allow_code_execution=False).prompts[20:30])
    with runner_for(config, 20, 32) as machine:
        answers = {one.prompt: one for one in machine.runner.run(asked, SHADOW)}
        tokenizer = machine.tokenizer
        del machine
    gc.collect()
    points = curve.draw([curve.track(a, SHADOW) for a in answers.values()], SHADOW, COSTS)

    pair = resolve(models)
    gap, agree, position = hf_positions(pair.small, pair.large, asked, answers, tokenizer)
    assert_same_curve(points, gap, agree, position >= 3)


def flags(text: str) -> np.ndarray:
    return np.array([c == "1" for c in text])


def test_predicted_time_of_trust_by_hand() -> None:
    """Two protected tokens, a run of three kept and a deferral, then one kept."""
    policy = Policy(accept=Accept.TRUST, protect_first=2)
    ms = curve.predicted_ms(flags("001110" + "1"), flags("1111111"), policy, COSTS)
    large, small = COSTS[Tier.LARGE], COSTS[Tier.SMALL]
    # The small model first reads both protected tokens and the prompt's last.
    first_run = small(3) + 3 * small(1) + large(4)
    assert ms == pytest.approx(2 * large(1) + first_run + small(1) + large(2))


def test_predicted_time_of_verified_drafts_by_hand() -> None:
    """Drafts of two: both right and a bonus, then one wrong and its replacement, then one."""
    policy = Policy(accept=Accept.EXACT, protect_first=0, draft_length=2)
    ms = curve.predicted_ms(flags("11111"), flags("11101"), policy, COSTS)
    large, small = COSTS[Tier.LARGE], COSTS[Tier.SMALL]
    full = small(1) + small(1) + large(3)
    wrong = small(2) + small(1) + large(3)
    assert ms == pytest.approx(full + wrong + small(1) + large(2))


def point(threshold: float, kept: float, agreement: float) -> curve.Point:
    return curve.Point(threshold, kept, agreement, kept * (1 - agreement), 1.0, 1.0)


def test_the_cliff_is_where_agreement_falls_off() -> None:
    points = [point(0.1, 0.9, 0.8), point(0.3, 0.7, 0.97), point(0.6, 0.5, 0.985), point(0.9, 0.2, 1.0)]
    found = curve.cliff(points)
    assert found is not None
    assert found.threshold == 0.3
    assert curve.cliff([point(0.1, 0.9, 1.0), point(0.5, 0.5, 1.0), point(0.9, 0.1, 1.0)]) is None


def test_losses_are_shares_of_all_tokens() -> None:
    one = curve.Track(np.array([0.9, 0.6, np.nan, 0.6]), flags("0001"), flags("1111"), flags("0000"))
    assert curve.losses([one], 0.5).tolist() == [0.5]
    assert curve.losses([one], 0.8).tolist() == [0.25]


def test_draft_length_follows_agreement() -> None:
    policy = Policy(accept=Accept.EXACT, protect_first=0)
    right = curve.Track(np.ones(60), np.ones(60, bool), np.ones(60, bool), np.zeros(60, bool))
    often_wrong = replace(right, agrees=np.arange(60) % 2 == 0)
    lengths = [curve.best_draft_length([one], policy, 0.5, COSTS) for one in (right, often_wrong)]
    assert lengths[0] > lengths[1] >= 1

"""Learned routers beat the gap where there is more to know, and are not used where there is not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from gateway.core import Signals
from gateway.router import FEATURES, features
from gateway.tuning.judge import Examples, calibration_error, judge
from gateway.tuning.learn import join, learn, predict, tape_examples, train

WIDTH = 24
"""Of the hidden states in these tests."""


@cache
def world(seed: int, num_prompts: int, informative: bool, hidden: float = 0.0) -> Examples:
    """Positions whose agreement hangs on gap and, where informative, on attention entropy; hidden: how much
    it hangs on one direction of a hidden state that no other feature tells (0: there are no states)."""
    rng = np.random.default_rng(seed)
    n = num_prompts * 40
    gap = rng.beta(2, 1, n)
    attention = rng.normal(2.0, 0.5, n)
    z = 6 * gap - 2.2 - (4 * (attention - 2.0) if informative else 0.0)
    states = rng.normal(3.0, 2.0, (n, WIDTH if hidden else 0)).astype("<f2")
    if hidden:
        z += hidden * (states[:, :4].astype(float).mean(axis=1) - 3.0)
    agrees = rng.random(n) < 1 / (1 + np.exp(-z))
    x = np.array(
        [
            features(Signals(float(0.5 + g / 2), float(g), float(1 - g), float(a)), i % 40, 0.1, 1.0)
            for i, (g, a) in enumerate(zip(gap, attention, strict=True))
        ]
    )
    return Examples(x, agrees, np.ones(n), np.repeat(np.arange(num_prompts), 40), states)


@pytest.mark.parametrize("units", [0, 8])
def test_probabilities_are_calibrated_although_classes_were_balanced(units: int) -> None:
    router = train(world(1, 80, True), units)
    held = world(2, 80, True)
    p = predict(router, held)
    assert calibration_error(p, held.agrees) < 0.04
    assert p.mean() == pytest.approx(held.agrees.mean(), abs=0.03)


def test_prediction_is_what_the_policy_computes() -> None:
    router = train(world(1, 10, True), 4)
    said = Signals(0.7, 0.5, 1.25, 2.5)
    row = np.array([features(said, 30, 0.25, 0.875)])
    one = Examples(row, np.array([True]), np.ones(1), np.zeros(1, dtype=int), np.zeros((1, 0)))
    assert predict(router, one)[0] == pytest.approx(router.agreement(said, 30, 0.25, 0.875), abs=1e-9)


@pytest.mark.parametrize("units", [0, 4])
def test_what_never_varied_has_no_say(units: int) -> None:
    """Acceptance is always 1 in these labels; a served row where it is not must score alike."""
    router = train(world(1, 10, True), units)
    said = Signals(0.7, 0.5, 1.25, 2.5)
    assert router.agreement(said, 30, 0.1, 0.25) == router.agreement(said, 30, 0.1, 1.0)


def test_training_is_repeatable() -> None:
    assert train(world(1, 10, True), 4) == train(world(1, 10, True), 4)


def test_beats_the_gap_where_attention_tells_more() -> None:
    said: list[str] = []
    found = learn(world(3, 80, True), world(4, 60, True), said.append)
    assert found.router is not None
    gap, *rules = found.judged
    assert gap.name == "gap"
    assert gap.gain is None
    assert all(rule.auroc > gap.auroc + 0.03 for rule in rules)
    assert max(rule.kept[0.99] for rule in rules) > gap.kept[0.99]
    assert len(said) == 2


def test_a_hidden_state_that_tells_more_is_used() -> None:
    said: list[str] = []
    found = learn(world(3, 80, False, 3.0), world(4, 60, False, 3.0), said.append)
    rules = {rule.name: rule for rule in found.judged}
    assert list(rules) == ["gap", "logistic", "mlp", "logistic + hidden state", "mlp + hidden state"]
    assert rules["logistic + hidden state"].auroc > rules["logistic"].auroc + 0.03
    assert found.kind.endswith("+ hidden state")
    assert found.router is not None
    assert len(found.router.probe) == WIDTH
    # The four columns that matter weigh alike, the others hardly.
    weights = np.abs(train(world(3, 80, False, 3.0), 0, probes=True).probe)
    assert weights[:4].min() > 3 * weights[4:].max()


@pytest.mark.parametrize("units", [0, 4])
def test_prediction_with_a_hidden_state_is_what_the_policy_computes(units: int) -> None:
    data = world(1, 10, True, 2.0)
    router = train(data, units, probes=True)
    said = Signals(0.7, 0.5, 1.25, 2.5, data.hidden[7].tobytes())
    row = np.array([features(said, 30, 0.25, 0.875)])
    one = Examples(row, np.array([True]), np.ones(1), np.zeros(1, dtype=int), data.hidden[7:8])
    assert predict(router, one)[0] == pytest.approx(router.agreement(said, 30, 0.25, 0.875), abs=1e-9)


def test_is_not_used_where_the_gap_says_it_all() -> None:
    found = learn(world(5, 40, False), world(6, 40, False), lambda _: None)
    assert found.router is None


def test_labels_that_all_agree_teach_nothing() -> None:
    data = world(1, 4, True)
    with pytest.raises(ValueError, match="same"):
        train(replace(data, agrees=np.ones(len(data), dtype=bool)), 0)


def test_rare_probes_count_for_what_they_stand_for() -> None:
    columns = {
        "request_id": ["a", "a", "b"], "idx": [3, 4, 5], "top1_p": [0.5] * 3, "gap": [0.1, 0.2, 0.3],
        "entropy": [1.0] * 3, "attn_entropy": [None] * 3, "run_length": [0, 32, 64],
        "ema_acceptance": [1.0] * 3, "small_choice": [1, 2, 3], "large_choice": [1, 2, 4],
        "propensity": [None, 0.1, 0.5],
    }  # fmt: skip
    found = tape_examples(columns)
    assert found.weight.tolist() == [1.0, 10.0, 2.0]
    assert found.agrees.tolist() == [True, True, False]
    assert found.group.tolist() == [0, 0, 1]
    assert found.x[:, FEATURES.index("run_share")].tolist() == [0.0, 0.5, 1.0]
    assert found.hidden.shape == (3, 0)
    state = np.array([0.5, -2.0], dtype="<f2")
    seen = tape_examples(columns | {"hidden": [state.tobytes()] * 3})
    assert seen.hidden.tolist() == [[0.5, -2.0]] * 3
    both = join([found, found])
    assert both.group.tolist() == [0, 0, 1, 2, 2, 3]
    assert judge("gap", both.gap, both).gain is None

"""The guarantee: it errs as rarely as it says, and it is not vacuous."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tuning.guarantee import bets, check_bound, fewest_prompts, fixed_sequence, likely_prompts

BOUND, DELTA = 0.02, 0.05
THRESHOLDS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)


def pool_of_losses(rng: np.random.Generator, num_prompts: int, at_half: float) -> dict[float, np.ndarray]:
    """A pool of prompts, 64 tokens each: loss by threshold, falling as the threshold rises.

    Prompts differ (a gamma of shape 1/2, so a few are bad); at_half is the pool's mean at threshold 0.5.
    """
    badness = rng.gamma(0.5, 2.0, num_prompts)
    badness /= badness.mean()
    uniforms = rng.random((num_prompts, 64))
    by_threshold = {}
    for threshold in THRESHOLDS:
        rate = at_half * math.exp(6 * (0.5 - threshold))
        by_threshold[threshold] = (uniforms < np.minimum(rate * badness, 0.9)[:, None]).mean(axis=1)
    return by_threshold


@pytest.mark.parametrize("at_half", [0.012, 0.02, 0.04])
def test_chosen_threshold_is_rarely_beyond_the_bound(at_half: float) -> None:
    """200 draws of 300 prompts from a fixed pool: the pool's mean there exceeds the bound in about 5 %."""
    rng = np.random.default_rng(7)
    pool = pool_of_losses(rng, 5000, at_half)
    wrong = 0
    for _ in range(200):
        drawn = rng.integers(0, 5000, 300)
        chosen = fixed_sequence(THRESHOLDS, lambda t, d=drawn: pool[t][d], BOUND, DELTA)
        wrong += chosen.threshold is not None and pool[chosen.threshold].mean() > BOUND
    # 5 % of 200 is 10; three standard deviations of a binomial are 9 more.
    assert wrong <= 19


def test_boundary_passes_at_most_at_the_stated_rate() -> None:
    """A policy exactly at the bound: the hardest case, 2000 runs, at most 5 % plus three deviations."""
    rng = np.random.default_rng(11)
    losses = rng.binomial(50, BOUND, (2000, 300)) / 50
    passed = sum(check_bound(row, BOUND, DELTA).passed for row in losses)
    assert passed <= 2000 * DELTA + 3 * math.sqrt(2000 * DELTA * (1 - DELTA))


@pytest.mark.parametrize("num_tokens", [32, 128])
def test_a_quarter_of_the_bound_passes_with_300_prompts(num_tokens: int) -> None:
    rng = np.random.default_rng(3)
    badness = rng.gamma(0.5, 2.0, (200, 300))
    losses = rng.binomial(num_tokens, np.minimum(BOUND / 4 * badness, 1.0)) / num_tokens
    assert sum(check_bound(row, BOUND, DELTA).passed for row in losses) >= 180


def test_prompts_needed_without_any_disagreement() -> None:
    """ln 20 / ln(1 + .02/.98) = 148.3; the stake is a hair below the largest."""
    assert fewest_prompts(0.02, 0.05) == 149
    assert not check_bound([0.0] * 148, 0.02, 0.05).passed
    assert check_bound([0.0] * 149, 0.02, 0.05).passed


def test_likely_prompts_needed() -> None:
    assert likely_prompts(0.02, 0.05, 0.02, 0.01) == 0
    assert likely_prompts(0.02, 0.05, 0.0, 0.0) == pytest.approx(149, abs=3)
    assert likely_prompts(0.02, 0.05, 0.01, 0.02) > likely_prompts(0.02, 0.05, 0.005, 0.02)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60), st.floats(0.001, 0.5), st.integers(0, 59))
def test_bets_are_predictable_and_admissible(losses: list[float], bound: float, change: int) -> None:
    """A bet does not change with the loss it is staked on, nor can it ruin the wealth."""
    values = np.array(losses)
    made = bets(values, bound)
    at = change % len(losses)
    values[at:] = 1.0 - values[at:]
    assert (bets(values, bound)[: at + 1] == made[: at + 1]).all()
    assert (1 - made * (1 - bound) > 0).all()
    assert (made >= 0).all()


def test_stops_at_the_first_failure() -> None:
    asked = []

    def losses_at(threshold: float) -> list[float]:
        asked.append(threshold)
        return [0.0 if threshold > 0.8 else 0.5] * 200

    chosen = fixed_sequence([0.5, 0.9, 0.7, 0.95], losses_at, BOUND, DELTA)
    assert chosen.threshold == 0.9
    assert asked == [0.95, 0.9, 0.7]
    assert [verdict.passed for _, verdict in chosen.verdicts] == [True, True, False]


def test_nothing_qualifies() -> None:
    assert fixed_sequence([0.9], lambda _: [0.1] * 300, BOUND, DELTA).threshold is None
    assert fixed_sequence([0.9], lambda _: [], BOUND, DELTA).threshold is None


@pytest.mark.parametrize("losses", [[-0.1], [1.1], [math.nan]])
def test_losses_outside_their_range(losses: list[float]) -> None:
    with pytest.raises(ValueError, match="losses"):
        check_bound(losses, BOUND, DELTA)


@pytest.mark.parametrize(("bound", "delta"), [(0.0, 0.05), (1.0, 0.05), (0.02, 0.0), (0.02, 1.0)])
def test_senseless_levels(bound: float, delta: float) -> None:
    with pytest.raises(ValueError, match="strictly between"):
        check_bound([0.0], bound, delta)

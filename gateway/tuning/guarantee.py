"""A bound on a policy's mean disagreement that holds with a stated confidence, prompt as the unit.

Testing by betting (Waudby-Smith & Ramdas 2024, arXiv 2010.09686): under "the mean loss is at least the
bound" the wealth prod(1 + lambda_i (bound - loss_i)) is a nonnegative supermartingale as long as each bet
lambda_i is fixed before loss_i is seen, so it ever reaches 1/delta with probability at most delta (Ville).
Thresholds are tried in an order fixed beforehand, each at full delta, up to the first that fails: the chance
that any chosen threshold is wrong stays at delta (fixed-sequence testing; Maurer 1995; Learn Then Test).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

STAKE = 0.999
"""Share of the largest admissible bet that is ever staked, so that no single prompt can ruin the wealth."""

PRIOR_PROMPTS = 4.0
"""Weight, in prompts, of the prior guess (half the bound, a variance of its square) in the first bets."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the test says of one threshold: passed, or not shown.

    wealth: the largest on the way; passed means it reached 1/delta. mean: the observed mean loss.
    """

    passed: bool
    wealth: float
    mean: float
    num_prompts: int


def check_bound(losses: Sequence[float], bound: float, delta: float) -> Verdict:
    """Reject "E[loss] >= bound" at level delta? losses in [0, 1], one a prompt, in an order fixed beforehand.

    Raises ValueError for losses outside [0, 1], or a bound or delta outside (0, 1).
    """
    _check(bound, delta)
    values = np.asarray(losses, dtype=np.float64)
    if values.size and not (values.min() >= 0.0 and values.max() <= 1.0):
        raise ValueError("losses must lie in [0, 1]")
    steps = np.log1p(bets(values, bound) * (bound - values))
    wealth = float(np.exp(np.max(np.cumsum(steps), initial=0.0)))
    mean = float(values.mean()) if values.size else math.nan
    return Verdict(wealth >= 1 / delta, wealth, mean, values.size)


def bets(losses: np.ndarray, bound: float) -> np.ndarray:
    """lambda_i for each loss, read off the losses before it alone.

    The bet that maximises expected log-wealth to second order for the mean and variance seen so far, within
    [0, STAKE / (1 - bound)], where no loss of 1 can make the wealth negative.
    """
    n = np.arange(losses.size)
    before = np.concatenate([[0.0], np.cumsum(losses)[:-1]])[: losses.size]
    squares = np.concatenate([[0.0], np.cumsum(losses**2)[:-1]])[: losses.size]
    guess = bound / 2
    weight = PRIOR_PROMPTS + n
    mean = (PRIOR_PROMPTS * guess + before) / weight
    second = (PRIOR_PROMPTS * (guess**2 + guess**2) + squares) / weight
    edge = bound - mean
    variance = np.maximum(second - mean**2, 0.0)
    wanted = edge / np.maximum(variance + edge**2, 1e-12)
    return np.asarray(np.clip(wanted, 0.0, STAKE / (1 - bound)))


def fewest_prompts(bound: float, delta: float) -> int:
    """How many prompts the test needs even if no token ever disagrees."""
    _check(bound, delta)
    # The bets of an all-zero run reach the largest stake at once: each prompt multiplies wealth alike.
    most = 4 * math.ceil(math.log(1 / delta) / math.log1p(bound / (1 - bound))) + 4
    wealth = np.cumsum(np.log1p(bets(np.zeros(most), bound) * bound))
    return int(np.argmax(wealth >= math.log(1 / delta))) + 1


def likely_prompts(bound: float, delta: float, disagreement: float, spread: float) -> int:
    """About how many prompts a policy needs whose losses have this mean and standard deviation.

    The expected log-wealth of a constant best bet; 0 where the mean is not below the bound.
    """
    _check(bound, delta)
    edge = bound - disagreement
    if edge <= 0:
        return 0
    bet = min(edge / (spread**2 + edge**2), STAKE / (1 - bound))
    gain = bet * edge - bet**2 * (spread**2 + edge**2) / 2
    return math.ceil(math.log(1 / delta) / gain)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The lowest threshold that the test let pass (None: not even the strictest), and every verdict."""

    threshold: float | None
    verdicts: tuple[tuple[float, Verdict], ...]


def fixed_sequence(
    thresholds: Iterable[float], losses_at: Callable[[float], Sequence[float]], bound: float, delta: float
) -> Chosen:
    """Try thresholds from the strictest (highest) down, stop at the first that fails.

    losses_at runs the policy at a threshold and is not asked beyond the first failure.
    """
    chosen: float | None = None
    verdicts: list[tuple[float, Verdict]] = []
    for threshold in sorted(set(thresholds), reverse=True):
        verdict = check_bound(losses_at(threshold), bound, delta)
        verdicts.append((threshold, verdict))
        if not verdict.passed:
            break
        chosen = threshold
    return Chosen(chosen, tuple(verdicts))


def _check(bound: float, delta: float) -> None:
    if not 0 < bound < 1 or not 0 < delta < 1:
        raise ValueError(f"bound {bound} and delta {delta} must lie strictly between 0 and 1")

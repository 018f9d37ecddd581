"""The accept rules against their formulas, written out by hand."""

from __future__ import annotations

import math

import pytest

from gateway.accept import accepts, num_accepted
from gateway.core import Accept, Signals, TopK
from gateway.policy import Policy
from gateway.sampling import Reading

X, Y = 3, 7
LOSSY = (Accept.THRESHOLD, Accept.TOKEN_V3, Accept.TYPICAL)


def reading(
    p_x: float, *, token: int = Y, top: float = 0.6, entropy: float = 1.0, allowed: bool = True
) -> Reading:
    return Reading(token, top, Signals(top, 0.1, entropy), TopK((token, X), (-0.5, -2.0)), p_x, allowed)


@pytest.mark.parametrize("rule", [Accept.EXACT, *LOSSY])
def test_the_large_models_own_token_always_stands(rule: Accept) -> None:
    assert accepts(Policy(accept=rule, accept_threshold=1.0, alpha=0.0), Y, reading(0.0, allowed=False))


def test_exact_takes_nothing_else() -> None:
    assert not accepts(Policy(accept=Accept.EXACT), X, reading(0.59))


@pytest.mark.parametrize(
    ("policy", "p_x", "top", "entropy", "stands"),
    [
        (Policy(accept=Accept.THRESHOLD, accept_threshold=0.25), 0.25, 0.6, 1.0, True),
        (Policy(accept=Accept.THRESHOLD, accept_threshold=0.25), 0.2499, 0.6, 1.0, False),
        # token_v3, alpha 0.25: at least three quarters of the top probability.
        (Policy(accept=Accept.TOKEN_V3, alpha=0.25), 0.375, 0.5, 1.0, True),
        (Policy(accept=Accept.TOKEN_V3, alpha=0.25), 0.374, 0.5, 1.0, False),
        # typical: 0.09 while exp(-H) >= 0.3, that is H <= ln(10/3); then 0.3 exp(-H).
        (Policy(accept=Accept.TYPICAL), 0.0901, 0.6, 1.2, True),
        (Policy(accept=Accept.TYPICAL), 0.0899, 0.6, 1.2, False),
        (Policy(accept=Accept.TYPICAL), 0.0301, 0.6, math.log(10), True),
        (Policy(accept=Accept.TYPICAL), 0.0299, 0.6, math.log(10), False),
    ],
)
def test_lossy_rules_at_their_bounds(
    policy: Policy, p_x: float, top: float, entropy: float, stands: bool
) -> None:
    assert accepts(policy, X, reading(p_x, top=top, entropy=entropy)) is stands


@pytest.mark.parametrize("rule", LOSSY)
def test_what_the_large_model_could_not_have_drawn_never_stands(rule: Accept) -> None:
    assert not accepts(Policy(accept=rule), X, reading(0.5, allowed=False))


def test_trust_holds_what_it_is_asked_about_to_the_large_models_own_token() -> None:
    """Kept tokens are never asked about; looked-up ones are."""
    assert not accepts(Policy(accept=Accept.TRUST), X, reading(0.59))
    assert accepts(Policy(accept=Accept.TRUST), Y, reading(0.59))


@pytest.mark.parametrize(("drafts", "num"), [((Y, Y, Y), 3), ((Y, X, Y), 1), ((X, Y, Y), 0), ((), 0)])
def test_the_accepted_prefix_ends_at_the_first_that_falls(drafts: tuple[int, ...], num: int) -> None:
    said = [reading(0.2)] * (len(drafts) + 1)
    assert num == num_accepted(Policy(accept=Accept.EXACT), drafts, said)

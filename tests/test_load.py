"""Draft caps: right where the arithmetic is known in closed form, and never much slower than not routing."""

import random

import pytest

from gateway.core import Tier
from gateway.load import FIRST_HOLD_MS, REGRET_LIMIT, SETTLED, WINDOW_MS, CostTable, Load

FLAT = {Tier.SMALL: CostTable((1, 128), (10.0, 10.0)), Tier.LARGE: CostTable((1, 128), (50.0, 50.0))}
PER_TOKEN = {Tier.SMALL: CostTable((1, 100), (4.0, 400.0)), Tier.LARGE: CostTable((1, 100), (10.0, 1000.0))}


def test_cost_between_and_beyond_points() -> None:
    table = CostTable((1, 2, 4), (10.0, 10.0, 30.0))
    assert [table(n) for n in (1, 1.5, 3, 4, 6)] == [10.0, 10.0, 20.0, 30.0, 50.0]


def test_below_the_knee_the_best_length_is_that_of_the_closed_form() -> None:
    load = Load(FLAT)
    load.keep, load.hit = 1.0, 0.8
    # Passes of any size cost the same: k drafts cost 10 k + 50 ms and come to (1 - .8^(k+1)) / .2 tokens.
    speeds = {k: (1 - 0.8 ** (k + 1)) / 0.2 / (10 * k + 50) * 50 for k in range(1, 33)}
    best = max(speeds, key=speeds.__getitem__)
    assert load.best(1) == (best, pytest.approx(speeds[best]))
    assert load.cap(1) == best


def test_where_every_token_has_its_full_price_nothing_is_drafted() -> None:
    assert Load(PER_TOKEN).cap(4) == 0


def test_useless_drafts_are_switched_off_by_what_is_seen() -> None:
    load = Load(FLAT)
    assert load.cap(1) > 0
    for _ in range(400):
        load.saw_verified(Tier.SMALL, 0, 1)
    load.saw_pass(Tier.LARGE, 50.0, 2, 1, 1)
    assert load.cap(1) == 0


def test_a_belief_counts_as_ten_observations_and_what_is_seen_as_one_each() -> None:
    load = Load(FLAT)
    believed = load.keep
    for _ in range(20):
        load.saw_proposal(kept=False)
    assert load.keep == pytest.approx(believed * 10 / 30)
    # From the fiftieth on the mean runs: one more weighs a fiftieth.
    for _ in range(100):
        load.saw_proposal(kept=False)
    before = load.keep
    load.saw_proposal(kept=True)
    assert load.keep == pytest.approx(before + (1 - before) / 50)


def test_drafts_that_pay_only_on_easy_text_are_tried_and_given_up_where_it_is_hard() -> None:
    # Two AVX2 cores: ms of the default pair's passes.
    costs = {
        Tier.SMALL: CostTable((1, 2, 8), (33.0, 40.0, 72.0)),
        Tier.LARGE: CostTable((1, 2, 4, 8), (106.0, 117.0, 135.0, 220.0)),
    }
    load = Load(costs)
    assert load.cap(1) > 0
    for _ in range(15):
        load.saw_proposal(kept=False)
        load.saw_pass(Tier.LARGE, 106.0, 1, 1, 1)
    assert load.cap(1) == 0


def test_reading_prompts_is_not_held_against_routing() -> None:
    small, large = CostTable((1, 4, 62), (10.0, 10.0, 300.0)), CostTable((1, 4, 60), (50.0, 50.0, 900.0))
    load = Load({Tier.SMALL: small, Tier.LARGE: large})
    for _ in range(40):  # an answer's prompt, then a round of two drafts that stood
        load.saw_pass(Tier.LARGE, 900.0, 60, 0, 1, 60)
        load.saw_pass(Tier.SMALL, 300.0, 62, 0, 1, 60)
        load.saw_pass(Tier.SMALL, 10.0, 1, 0, 1)
        load.saw_pass(Tier.LARGE, 50.0, 3, 3, 1)
    assert load.off_ms <= 0
    assert load.cap(1) > 0
    for _ in range(80):  # rounds that come to one token
        load.saw_pass(Tier.SMALL, 10.0, 1, 0, 1)
        load.saw_pass(Tier.SMALL, 10.0, 1, 0, 1)
        load.saw_pass(Tier.LARGE, 50.0, 3, 1, 1)
    assert load.off_ms > 0


def test_after_a_bad_answer_routing_is_tried_again() -> None:
    load = Load(FLAT)
    for _ in range(400):
        load.saw_verified(Tier.SMALL, 0, 1)
    for _ in range(2000):
        load.saw_pass(Tier.LARGE, 50.0, 1, 1, 1)
    assert load.cap(1) > 0


def test_what_one_bad_answer_switched_off_is_tried_again_although_drafts_go_on() -> None:
    """Ten ms a token: lookups, riders and guesses pay only while they are likely to be right."""
    small = CostTable((1, 100), (0.1, 0.1))
    large = CostTable((1, 2, 100), (50.0, 60.0, 1040.0))
    load = Load({Tier.SMALL: small, Tier.LARGE: large}, ride_along=True)

    def tried() -> tuple[bool, bool, bool, bool]:
        return load.cap(1) > 0, load.lookup_cap(1) > 0, load.ride_pays(1), load.guess_cap(1) > 0

    assert tried() == (True,) * 4
    for _ in range(400):
        load.saw_verified(Tier.LOOKUP, 0, 1)
        load.saw_rider(False, guessed=False)
        load.saw_rider(False, guessed=True)
    load.saw_pass(Tier.LARGE, 50.0, 1, 2, 1)
    assert tried() == (True, False, False, False)
    keep, hit = load.keep, load.hit
    for _ in range(2000):
        load.saw_pass(Tier.LARGE, 50.0, 1, 2, 1)
    assert tried() == (True,) * 4
    assert (load.keep, load.hit) == (keep, hit)


def test_lookup_drafts_cost_only_their_share_of_the_large_pass() -> None:
    load = Load(FLAT)
    assert load.lookup_cap(1) == load.longest
    assert Load(PER_TOKEN).lookup_cap(4) == 0


def test_a_long_debt_is_paid_only_by_a_long_answer() -> None:
    small = CostTable((1, 1000), (10.0, 1000.0))
    load = Load({Tier.SMALL: small, Tier.LARGE: FLAT[Tier.LARGE]})
    cap = load.cap(1)
    assert cap > 0
    assert load.cap_for(1, debt=SETTLED, num_left=1) == cap
    assert load.cap_for(1, debt=SETTLED + 1, num_left=1) == 0
    assert load.cap_for(1, debt=900, num_left=10) == 0
    assert load.cap_for(1, debt=900, num_left=1000) == cap


def test_a_loss_switches_off_for_a_while_and_longer_the_next_time() -> None:
    load = Load(FLAT)

    def lose() -> float:
        """Passes twice as dear as large-only until routing is off; how long it stays off."""
        while load.off_ms <= 0:
            load.saw_pass(Tier.SMALL, 10.0, 1, 0, 1)
            load.saw_pass(Tier.LARGE, 50.0, 2, 1, 1)
        return load.off_ms

    assert lose() == FIRST_HOLD_MS
    assert load.cap(1) == 0
    while load.off_ms > 0:
        load.saw_pass(Tier.LARGE, 50.0, 1, 1, 1)
    assert load.cap(1) > 0
    assert lose() == 2 * FIRST_HOLD_MS


def decode(
    load: Load, good: float, slower_small: float, slower_all: float, total_ms: float
) -> tuple[float, float]:
    """Rounds at N = 1 whose proposals hold with chance `good`: ms spent, and ms of the large model alone."""
    rng = random.Random(7)
    spent = alone = 0.0
    while spent < total_ms:
        k, held = load.cap(1), 0
        for _ in range(k):
            ms = 10.0 * slower_small * slower_all
            load.saw_pass(Tier.SMALL, ms, 1, 0, 1)
            spent += ms
        while held < k and rng.random() < good:
            held += 1
        load.saw_verified(Tier.SMALL, held, min(held + 1, k))
        load.saw_pass(Tier.LARGE, 50.0 * slower_all, k + 1, held + 1, 1)
        spent, alone = spent + 50.0 * slower_all, alone + (held + 1) * 50.0 * slower_all
    return spent, alone


@pytest.mark.parametrize("good", [0.0, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("slower_small", [1.0, 3.0, 8.0])
def test_regret_against_large_only_stays_small(good: float, slower_small: float) -> None:
    """Drafts that are worse, or dearer, than believed at first: the total over 200 s."""
    load = Load(FLAT)
    spent, alone = decode(load, good, slower_small, 1.0, 200_000)
    assert spent <= (1 + REGRET_LIMIT) * alone + 2 * WINDOW_MS


def test_a_machine_that_became_slower_for_both_models_goes_on_routing() -> None:
    load = Load(FLAT)
    spent, alone = decode(load, 0.85, 1.0, 4.0, 120_000)
    assert load.cap(1) > 0
    assert spent < 0.8 * alone


def test_a_large_pass_waits_while_company_is_cheaper_than_a_pass_of_its_own() -> None:
    load = Load(FLAT)
    load.keep = 0.7
    # 50 ms for one row; or, of seven that draft, .3 join: 3.1 rows in 50 ms and .3 of the small pass's 10.
    assert load.gathers(3, 1, 7)
    # Seven rows in 50 ms are .14 a ms; 7.3 in 53 ms are fewer.
    assert not load.gathers(21, 7, 1)
    load.keep = 0.0
    assert not Load(PER_TOKEN).gathers(3, 1, 7), "where every token has its full price company saves nothing"

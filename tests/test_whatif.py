"""What-if against the scripted engine run again under the other settings."""

from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from tape_fakes import Script

from gateway.core import Accept, Action, Mode, Outcome
from gateway.policy import Policy
from gateway.recorded import COLUMNS
from gateway.whatif import NUM_BINS, Labels, expected_agreement, what_if
from logs.rows import Capture, step_table


def recorded(script, capture=Capture.FULL):
    row = {"request_id": "r", "choice": 0, "policy": asdict(script.policy)}
    return row, step_table(script.rows, [1] * len(script.rows), capture).select(COLUMNS)


def asked(script, policy=None, **overrides):
    return what_if(*recorded(script), policy or replace(script.policy, **overrides))


policies = st.builds(
    Policy,
    mode=st.sampled_from([Mode.ROUTED, Mode.ROUTED, Mode.LARGE_ONLY, Mode.SMALL_ONLY]),
    accept=st.sampled_from([Accept.EXACT, Accept.TRUST]),
    threshold=st.floats(0, 1),
    draft_length=st.integers(1, 6),
    protect_first=st.integers(0, 12),
    max_small_run=st.integers(1, 12),
    run_weight=st.sampled_from([0.0, -0.3]),
    acceptance_weight=st.sampled_from([0.0, 0.25]),
    loop_ngram=st.integers(1, 9),
    loop_limit=st.integers(0, 3),
)


@settings(max_examples=50, deadline=None)
@given(policies, st.integers(0, 1000))
def test_the_recorded_settings_flip_nothing(policy, seed):
    answer = asked(Script(policy, seed).run())

    assert (answer.flips, answer.first_flip, answer.exact_until, answer.unknown) == ([], None, None, [])
    assert answer.estimate.kept_share == answer.estimate.recorded_kept_share


@settings(max_examples=40, deadline=None)
@given(policies, st.sampled_from([Capture.NO_PROMPT, Capture.SIGNALS]), st.integers(0, 1000))
def test_nor_do_they_where_less_is_recorded(policy, capture, seed):
    script = Script(policy, seed).run()

    assert what_if(*recorded(script, capture), policy).flips == []


@settings(max_examples=30, deadline=None)
@given(policies, st.floats(0, 1), st.integers(0, 1000))
def test_a_stricter_threshold_keeps_no_more(policy, stricter, seed):
    policy = replace(policy, mode=Mode.ROUTED, run_weight=0.0, acceptance_weight=0.0, max_small_run=1000)
    policy = replace(policy, loop_limit=0, draft_length=1000)
    script = Script(replace(policy, draft_length=5), seed).run()
    low, high = sorted((policy.threshold, stricter))
    kept = [asked(script, replace(policy, threshold=t)).estimate.kept_share for t in (low, high)]

    assert kept[0] >= kept[1]


class Lockstep(Script):
    """A script whose models say the same at a position whatever the settings."""

    def _models(self, idx, context):
        self.random.seed(self.seed * 1000 + idx)
        return super()._models(idx, context)


@pytest.mark.parametrize("accept", [Accept.EXACT, Accept.TRUST])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7, 1.0])
def test_it_is_what_running_again_decides(accept, threshold):
    """Where the models do not react to the text, what-if is right to the end."""
    base = Policy(accept=accept, protect_first=3, loop_limit=0, draft_length=1)
    script = Lockstep(base, seed=5).run()
    other = replace(base, threshold=threshold)
    again = Lockstep(other, seed=5).run()

    answer = asked(script, other)

    written = {}
    for row in again.rows:
        if row.action is not None and row.outcome is not Outcome.DISCARDED:
            written[row.idx] = row.action.value
    assert {d["idx"]: d["action"] for d in answer.decisions} == {i: written[i] for i in range(60)}


def test_a_deferred_position_flips_first():
    script = Script(Policy(protect_first=0, loop_limit=0), seed=1).run()
    kept = next(r.idx for r in script.rows if r.action is Action.KEEP and r.outcome is Outcome.ACCEPTED)

    answer = asked(script, threshold=1.0)

    assert (answer.first_flip, answer.estimate.kept_share) == (kept, 0.0)


def test_under_exact_the_whole_trace_stays_exact():
    script = Script(Policy(protect_first=0, loop_limit=0), seed=1).run()

    answer = asked(script, threshold=0.9)

    assert len(answer.flips) > 5
    assert answer.exact_until is None


def test_under_trust_it_is_exact_up_to_the_first_token_that_would_differ():
    script = Script(Policy(accept=Accept.TRUST, protect_first=0, loop_limit=0), seed=1, agreement=0.5).run()
    answer = asked(script, threshold=0.95)
    differing = [
        row.idx for row in script.rows if row.idx in answer.flips and row.token_id != row.large_choice
    ]

    assert answer.exact_until == differing[0] + 1
    assert answer.first_flip < differing[0]


def test_more_protection_defers_the_prefix():
    script = Script(Policy(protect_first=0, loop_limit=0, threshold=0.0), seed=2).run()

    answer = asked(script, protect_first=8)

    assert {d["reason"] for d in answer.decisions[:8]} == {"protected_prefix"}
    assert answer.decisions[8]["reason"] != "protected_prefix"


def test_positions_the_small_model_never_read_are_unknown():
    script = Script(Policy(mode=Mode.LARGE_ONLY), seed=2).run()
    script.rows[:] = [
        structs.replace(row, signals=None, small_choice=None, audit_agrees=None) for row in script.rows
    ]

    answer = asked(script, mode=Mode.ROUTED, protect_first=5)

    assert answer.unknown == list(range(5, 60))
    assert answer.flips == []


# ---- the estimate


def labels(**bins):
    total, agreed = [0.0] * NUM_BINS, [0.0] * NUM_BINS
    for name, (n, k) in bins.items():
        total[int(name[1:])], agreed[int(name[1:])] = n, k
    return Labels(tuple(total), tuple(agreed))


def test_agreement_of_one_bin_is_its_own_with_wilsons_interval():
    # Wilson 1927 for 8 of 10 at 95 %: the values of R's prop.test(8, 10, correct = FALSE).
    agreement, low, high, count = expected_agreement([0.52, 0.53], labels(b10=(10, 8)))

    assert (agreement, count) == (0.8, 10)
    assert (low, high) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)


def test_bins_are_weighted_by_what_is_kept():
    # Three tokens in a bin that agrees always, one in a bin that agrees half the time.
    agreement, low, high, count = expected_agreement(
        [0.9, 0.91, 0.92, 0.5], labels(b18=(100, 100), b10=(100, 50))
    )

    assert agreement == pytest.approx(0.875)
    assert count == 200
    assert low < 0.875 < high


@pytest.mark.parametrize(("scores", "known"), [([], {}), ([0.5], {}), ([0.5, 0.9], {"b10": (10, 9)})])
def test_a_bin_without_labels_gives_no_estimate(scores, known):
    assert expected_agreement(scores, labels(**known))[:3] == (None, None, None)


def test_the_last_bin_holds_score_one():
    assert (Labels.bin(0.0), Labels.bin(1.0), Labels.bin(0.5)) == (0, NUM_BINS - 1, NUM_BINS // 2)

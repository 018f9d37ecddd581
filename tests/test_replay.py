"""Decision replay against a scripted engine that keeps its own account of the rules."""

from dataclasses import asdict, replace

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from tape_fakes import Script

from gateway.core import Accept, Action, Mode, Outcome, Reason, Tier
from gateway.policy import Policy
from gateway.recorded import COLUMNS
from gateway.replay import UnknownPolicy, recorded_policy, replay, replay_all
from logs.rows import Capture, step_table


def recorded(script, capture=Capture.FULL):
    """A finished script as the tape gives it back: requests row and steps."""
    row = {"request_id": script.request_id, "choice": 0, "policy": asdict(script.policy)}
    return row, step_table(script.rows, [1] * len(script.rows), capture).select(COLUMNS)


policies = st.builds(
    Policy,
    mode=st.sampled_from([Mode.ROUTED, Mode.ROUTED, Mode.ROUTED, Mode.LARGE_ONLY, Mode.SMALL_ONLY]),
    accept=st.sampled_from([Accept.EXACT, Accept.TRUST]),
    threshold=st.floats(0, 1),
    draft_length=st.integers(1, 6),
    protect_first=st.integers(0, 12),
    max_small_run=st.integers(1, 12),
    bias=st.sampled_from([0.0, 0.1]),
    entropy_weight=st.sampled_from([0.0, -0.2]),
    run_weight=st.sampled_from([0.0, -0.3]),
    acceptance_weight=st.sampled_from([0.0, 0.25]),
    loop_ngram=st.integers(1, 9),
    loop_limit=st.integers(0, 3),
)


@settings(max_examples=60, deadline=None)
@given(policies, st.integers(0, 2**32))
def test_what_was_decided_is_recomputed(policy, seed):
    script = Script(policy, seed).run()

    result = replay(*recorded(script))

    assert result.mismatches == []
    assert result.decisions == sum(row.action is not None for row in script.rows)


@pytest.mark.parametrize("accept", [Accept.EXACT, Accept.TRUST])
def test_a_tape_without_tokens_still_replays(accept):
    script = Script(Policy(accept=accept, acceptance_weight=0.2), seed=4).run()

    result = replay(*recorded(script, Capture.SIGNALS))

    assert (result.mismatches, result.decisions > 40) == ([], True)


def test_the_scripts_reach_every_rule():
    """The property above would prove little if some rule never fired."""
    fired = set()
    for seed in range(8):
        for accept in (Accept.EXACT, Accept.TRUST):
            policy = Policy(accept=accept, max_small_run=6, loop_ngram=3, loop_limit=2, threshold=0.2)
            rows = Script(policy, seed).run().rows
            fired |= {(row.reason, row.outcome) for row in rows}

    reasons = {reason for reason, _ in fired}
    expected = ["protected_prefix", "confident", "low_confidence", "draft_full", "run_limit", "loop_guard"]
    assert {Reason(r) for r in expected} <= reasons
    assert set(Outcome) - {Outcome.FORCED} <= {outcome for _, outcome in fired}


WRONG = {
    "idx": 99,
    "seq": 999,
    "draft_pos": 31,
    "token_id": 7777,
    "tier": "tape",
    "action": "hold",
    "reason": "budget",
    "score": 0.123,
    "threshold": 0.9,
    "gap": -0.5,
    "run_length": 60,
    "ema_acceptance": 0.2,
    "draft_limit": 33,
    "guard_value": 5.0,
    "large_used": 1000,
    "small_choice": 7777,
    "outcome": "won",
}


@pytest.mark.parametrize("column", WRONG)
def test_one_wrong_value_is_found_where_it_is(column):
    script = Script(Policy(protect_first=2, loop_limit=0), seed=1).run()
    at = next(i for i, r in enumerate(script.rows) if i > 20 and r.outcome is Outcome.ACCEPTED)
    row, table = recorded(script)
    values = table[column].to_pylist()
    values[at] = WRONG[column]
    position = table.schema.get_field_index(column)
    table = table.set_column(position, column, pa.array(values, table.schema.field(column).type))

    found = replay(row, table).mismatches

    assert found
    assert (at if column != "seq" else WRONG["seq"]) in {mismatch.seq for mismatch in found}
    assert all(str(mismatch) for mismatch in found)


@pytest.mark.parametrize("column", COLUMNS)
def test_a_missing_column_is_no_reason_to_crash(column):
    row, table = recorded(Script(Policy(), seed=2).run())
    position = table.schema.get_field_index(column)
    field = table.schema.field(column)
    table = table.set_column(position, field, pa.nulls(table.num_rows, field.type))

    result = replay(row, table)

    # What only some rules or capture levels need may be missing; every other column is missed.
    optional = {"token_id", "large_choice", "attn_entropy", "hidden", "probe_u", "fact_value"}
    optional |= {"audit_agrees", "action"}
    optional |= {"round", "middle", "decision_no", "overruled_by"}
    assert bool(result.mismatches) is (column not in optional)


def test_a_missing_row_is_found():
    row, table = recorded(Script(Policy(), seed=2).run())
    table = pa.concat_tables([table.slice(0, 30), table.slice(31)])

    found = replay(row, table).mismatches

    assert (found[0].column, found[0].recorded, found[0].recomputed) == ("seq", 31, 30)


def test_a_changed_policy_is_found():
    script = Script(Policy(threshold=0.5), seed=2).run()
    row, table = recorded(script)
    row["policy"] = asdict(replace(script.policy, threshold=0.8))

    assert {"threshold", "action", "reason"} <= {m.column for m in replay(row, table).mismatches}


def test_a_draft_accepted_against_the_large_model_is_found_under_exact():
    script = Script(Policy(), seed=2).run()
    at = next(i for i, r in enumerate(script.rows) if r.outcome is Outcome.ACCEPTED)
    script.rows[at] = structs.replace(script.rows[at], large_choice=script.rows[at].token_id + 1)

    found = replay(*recorded(script)).mismatches

    assert [(m.seq, m.column, m.recomputed) for m in found] == [(at, "outcome", "rejected")]


def test_a_decision_without_signals_is_found():
    script = Script(Policy(protect_first=0), seed=2).run()
    at = next(i for i, r in enumerate(script.rows) if r.action is Action.KEEP)
    script.rows[at] = structs.replace(script.rows[at], signals=None)

    assert ("gap", at) in {(m.column, m.seq) for m in replay(*recorded(script)).mismatches}


def test_rows_whose_signals_came_later_replay_with_and_without_them():
    """A draft_full row is decided before the small model has spoken there; its signals are restated."""
    script = Script(Policy(threshold=0.0, protect_first=0, loop_limit=0), seed=3, agreement=1.0).run()
    assert {row.reason for row in script.rows} == {Reason.CONFIDENT, Reason.DRAFT_FULL}
    later = {"signals": None, "small_choice": None, "small_topk": None}
    early = [structs.replace(row, **later) if row.tier is Tier.LARGE else row for row in script.rows]

    assert replay(*recorded(script)).mismatches == []
    assert replay(*recorded(replace(script, rows=early))).mismatches == []


def test_a_trace_cut_off_in_the_middle_replays():
    row, table = recorded(Script(Policy(), seed=6).run())

    for length in range(table.num_rows):
        assert replay(row, table.slice(0, length)).mismatches == []


def test_replay_all_goes_through_every_choice():
    choices = [recorded(Script(Policy(), seed).run()) for seed in range(3)]

    results = list(replay_all(choices))

    assert [r.decisions for r in results] == [replay(*choice).decisions for choice in choices]


def test_a_policy_of_an_older_version_takes_defaults_for_what_it_lacks():
    assert recorded_policy({"mode": "small_only", "threshold": 0.25}) == Policy(
        mode=Mode.SMALL_ONLY, threshold=0.25
    )


@pytest.mark.parametrize("given", [{"tempo": 1}, {"mode": "sideways"}, {"accept": "maybe"}])
def test_a_policy_of_a_later_version_is_refused_by_name(given):
    with pytest.raises(UnknownPolicy, match=str(next(iter(given.values()))) + "|tempo"):
        recorded_policy(given)

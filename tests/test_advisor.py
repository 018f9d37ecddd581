"""The advisor's curve against counting by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tape_fakes import Script, record

from gateway.core import Accept, Outcome
from gateway.policy import Policy
from logs.advisor import advise, curve
from logs.labels import Labelled, labelled, scores
from logs.reader import TraceFilter
from logs.recorder import Recorder


def known(*entries):
    """Labels given as (score, agrees) or (score, agrees, weight)."""
    rows = [(*entry, 1.0)[:3] for entry in entries]
    column = [np.array(values) for values in zip(*rows, strict=True)] if rows else [np.array([])] * 3
    return Labelled(column[0].astype(float), column[2].astype(float), column[1].astype(bool), 1, 0.0, 1.0)


def test_each_point_counts_what_reaches_the_threshold():
    points = curve(known((0.9, True), (0.5, True), (0.5, False), (0.1, False)), (0.0, 0.5, 0.6, 1.0))

    assert [(p.kept_share, p.labels) for p in points] == [(1.0, 4), (0.75, 3), (0.25, 1), (0.0, 0)]
    assert [p.agreement for p in points] == [0.5, pytest.approx(2 / 3), 1.0, None]


def test_the_interval_is_wilsons():
    points = curve(known(*[(0.5, i < 8) for i in range(10)]), (0.5,))

    # R: prop.test(8, 10, correct = FALSE)
    assert (points[0].low, points[0].high) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)


def test_probed_labels_count_for_what_they_stand_for():
    points = curve(known((0.9, True), (0.9, False, 9.0)), (0.5,))

    assert points[0].agreement == pytest.approx(0.1)
    # Two labels, one of which outweighs the other: hardly more than one.
    assert points[0].high - points[0].low > 0.7


def test_without_labels_there_is_no_curve():
    assert curve(known()) == []


@given(st.lists(st.tuples(st.floats(0, 1, width=32), st.booleans()), min_size=1, max_size=50))
def test_a_higher_threshold_never_keeps_more(entries):
    shares = [point.kept_share for point in curve(known(*entries))]

    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1.0


def test_scores_are_the_ones_on_the_tape(recorder):
    policy = Policy(
        bias=0.1, gap_weight=0.7, entropy_weight=-0.05, run_weight=-0.2, acceptance_weight=0.2, loop_limit=0
    )
    script = Script(policy, 3).run()
    record(recorder, script)
    rows = recorder.reader().steps("r")
    rows = rows.filter(rows["score"].is_valid())

    assert scores(policy, rows).tolist() == rows["score"].to_pylist()
    assert len(rows) > 20


@pytest.fixture
def recorder(tmp_path):
    recorder = Recorder(tmp_path, flush_s=3600.0)
    yield recorder
    recorder.close()


def test_labels_of_a_tape_live_and_closed(recorder):
    scripts = [
        Script(Policy(accept=accept, loop_limit=0), seed, request_id=f"{accept}{seed}").run()
        for accept in (Accept.EXACT, Accept.TRUST)
        for seed in range(3)
    ]
    for script in scripts[:3]:
        record(recorder, script)
    recorder.compact()
    for script in scripts[3:]:
        record(recorder, script)
    expected = [
        (row.signals.gap, row.audit_agrees)
        for script in scripts
        for row in script.rows
        if row.audit_agrees is not None and row.outcome not in (Outcome.RECOVERED, Outcome.DISCARDED)
    ]

    found = labelled(recorder.reader(), Policy())

    assert sorted(zip(found.score.tolist(), found.agrees.tolist(), strict=True)) == sorted(expected)
    assert (found.requests, len(expected) > 300) == (6, True)
    binned = found.binned()
    assert (sum(binned.total), sum(binned.agreed)) == (len(expected), sum(agrees for _, agrees in expected))


def test_the_filter_chooses_the_traffic(recorder):
    record(recorder, Script(Policy(), 1, request_id="a").run())
    reader = recorder.reader()

    assert advise(reader, Policy(), TraceFilter(arm="canary")).curve == []
    assert advise(reader, Policy(threshold=0.7), TraceFilter(arm="stable")).current == 0.7
    assert advise(reader, Policy(), TraceFilter(arm="stable")).labels > 50

"""The numbers behind the smaller pages."""

from __future__ import annotations

import pytest
from fake_traces import pieces, simulate, summary
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from gateway.policy import Policy
from replay_ui import figures
from replay_ui.steps import Steps


def test_wilson_against_the_published_value() -> None:
    # 81 of 263: [0.2553, 0.3662] (Newcombe 1998, table I, method 3)
    low, high = figures.wilson(81, 263) or (0.0, 0.0)
    assert low == pytest.approx(0.2553, abs=1e-4)
    assert high == pytest.approx(0.3662, abs=1e-4)
    assert figures.wilson(0, 0) is None


def test_samples_read_what_prometheus_writes() -> None:
    registry = CollectorRegistry()
    tokens = Counter("tokentape:generation_tokens", "x", ["tier"], registry=registry)
    tokens.labels(tier="small").inc(7)
    tokens.labels(tier='odd "tier", a}').inc(2)
    Gauge("tokentape:num_requests_running", "x", registry=registry).set(3)
    found = figures.samples(generate_latest(registry).decode())
    assert figures.total(found, "generation_tokens_total") == 9
    assert figures.total(found, "generation_tokens_total", tier="small") == 7
    assert figures.total(found, "num_requests_running") == 3
    assert figures.total(found, "no_such") is None


def test_a_restarted_counter_counts_from_nothing() -> None:
    assert figures.rate(10, 30, 10) == 2
    assert figures.rate(1000, 30, 10) == 3
    assert figures.rate(None, 30, 10) is None
    assert figures.rate(10, 30, 0) is None


def test_throughput_spreads_an_answer_over_its_time_and_loses_no_token() -> None:
    answers = [
        {
            "first_token": 1000.0,
            "finished": 1060.0,
            "small_tokens": 60,
            "large_tokens": 30,
            "lookup_tokens": 0,
        }
    ]
    rows = figures.throughput(answers, now=1200.0, window_s=600.0, bucket_s=30.0)
    small = [row["tokens"] * 30 for row in rows if row["tier"] == "small"]
    assert sum(small) == pytest.approx(60)
    assert max(small) == pytest.approx(30)
    assert sum(row["tokens"] * 30 for row in rows if row["tier"] == "large") == pytest.approx(30)


def test_throughput_ignores_what_still_runs_and_what_is_long_over() -> None:
    answers = [{"received": 1.0, "finished": None}, {"received": 1.0, "finished": 2.0, "small_tokens": 9}]
    assert not any(row["tokens"] for row in figures.throughput(answers, now=5000.0))


def steps_of(text: str) -> Steps:
    return Steps.read(simulate(pieces(text), Policy(protect_first=0), seed=1))


def test_divergence() -> None:
    assert figures.divergence(steps_of("a b c"), steps_of("a b c")) is None
    assert figures.divergence(steps_of("a b c"), steps_of("a x c")) == 1
    assert figures.divergence(steps_of("a b c"), steps_of("a b")) == 2


def test_policy_differences_name_only_what_differs() -> None:
    columns = dict(steps_of("a b c").columns)
    a = summary("a", columns, Policy())
    b = summary("b", columns, Policy(threshold=0.75), arm="canary")
    assert figures.policy_differences(a, b) == [("arm", "stable", "canary"), ("threshold", "0.5", "0.75")]
    assert figures.policy_differences(a, a) == []


def test_count_differences_pair_both_sides() -> None:
    columns = dict(steps_of("a b c").columns)
    rows = figures.count_differences(summary("a", columns, Policy()), summary("b", columns, Policy()))
    assert ("output tokens", "3", "3") in rows


def test_at_threshold_takes_the_nearest_point() -> None:
    curve = [{"threshold": 0.1}, {"threshold": 0.5}]
    assert figures.at_threshold(curve, 0.35) == {"threshold": 0.5}
    assert figures.at_threshold([], 0.5) is None


def test_evidence_comes_nearer_by_factors() -> None:
    assert figures.toward(1.0, 1000) == 0
    assert figures.toward(10.0, 1000) == pytest.approx(1 / 3)
    assert figures.toward(5000.0, 1000) == 1
    assert figures.toward(None, 20) == 0

"""The evidence holds its promises (false alarms, power, missing data): by closed form and simulation."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alerts.evidence import DRIFT_LIMIT, Comparison, Evidence
from alerts.losses import BY_NAME, METRICS, SCORES_WEIGHT, agreement_loss, to_loss
from alerts.sequential import STAKES, Blocks, ECusum, EProcess, units_until

MARGIN, ALPHA = 0.04, 0.05
RUNS, LOOKS = 2000, 3000
differences = st.lists(st.floats(-1, 1), max_size=40)


def clipped(disagreement: np.ndarray) -> np.ndarray:
    return np.minimum(np.maximum(disagreement, 0), 0.25) / 0.25


class Arms:
    """Answers of request-keyed traffic: disagreement Beta(.64, 7.36), mean .08, sd .09, drawn from a pool."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.pool = self.rng.beta(0.64, 7.36, 1 << 15)
        self.mean_loss = float(clipped(self.pool).mean())

    def blocks(self, runs: int, looks: int, shift: float = 0.0, start: int = 0) -> Iterator[np.ndarray]:
        for t in range(looks):
            index = self.rng.integers(0, len(self.pool), (2, runs))
            canary = clipped(self.pool[index[0]] + (shift if t >= start else 0.0))
            yield canary - clipped(self.pool[index[1]])

    def boundary(self, runs: int, looks: int) -> Iterator[np.ndarray]:
        """The canary's mean loss is higher by exactly the margin: a share of its answers is lost."""
        lost = MARGIN / (1 - self.mean_loss)
        for d in self.blocks(runs, looks):
            # d + stable is the canary's loss; where it is lost, its loss is 1 and d = 1 - stable.
            stable = clipped(self.pool[self.rng.integers(0, len(self.pool), runs)])
            yield np.where(self.rng.random(runs) < lost, 1 - stable, d)


def reached(harm: np.ndarray, cusum: np.ndarray, returning: np.ndarray | float = 1.0) -> np.ndarray:
    """Whether agreement alone rolls back: combined as Evidence does it, every other metric silent."""
    weight = BY_NAME["agreement"].weight
    against = 1 + weight * (harm - 1)
    drift = 1 + weight * ((cusum + returning) / 2 - 1)
    return (against >= 1 / ALPHA) | (drift >= DRIFT_LIMIT)


def run(blocks: Iterator[np.ndarray], runs: int) -> dict[str, np.ndarray]:
    """First look (1, 2, ...) at which each process, and a rollback, is reached; else a huge number."""
    harm, passing = EProcess("harm", MARGIN, (runs,)), EProcess("pass", MARGIN, (runs,))
    cusum = ECusum(MARGIN, runs=(runs,))
    first = {name: np.full(runs, 10**9) for name in ("harm", "pass", "drift", "rollback")}
    for t, d in enumerate(blocks, start=1):
        for process in (harm, passing, cusum):
            process.update(d)
        evidence, drift = harm.values, cusum.values
        for name, hit in (
            ("harm", evidence >= 1 / ALPHA),
            ("pass", passing.values >= 1 / ALPHA),
            ("drift", drift >= DRIFT_LIMIT),
            ("rollback", reached(evidence, drift)),
        ):
            first[name][hit & (first[name] > t)] = t
    return first


def share(first: np.ndarray) -> float:
    return float((first < 10**9).mean())


# --- closed form ---


@settings(max_examples=50, deadline=None)
@given(differences, st.floats(0, 0.3))
def test_wealth_is_the_mean_over_stakes_of_the_product_of_bets(ds: list[float], margin: float) -> None:
    harm, passing = EProcess("harm", margin), EProcess("pass", margin)
    for d in ds:
        harm.update(d)
        passing.update(d)
    expected_harm = sum(math.prod(1 + s / (1 + margin) * (d - margin) for d in ds) for s in STAKES) / 5
    expected_pass = sum(math.prod(1 - s / (1 - margin) * (d - margin) for d in ds) for s in STAKES) / 5
    assert harm.value == pytest.approx(expected_harm, rel=1e-9)
    assert passing.value == pytest.approx(expected_pass, rel=1e-9)


@settings(max_examples=50, deadline=None)
@given(differences)
def test_cusum_follows_its_recursion(ds: list[float]) -> None:
    cusum, s = ECusum(MARGIN), 1.0
    for d in ds:
        cusum.update(d)
        s = max(s, 1.0) * (1 + 0.4 * (d - MARGIN))
    assert cusum.value == pytest.approx(s, rel=1e-9)


@settings(max_examples=50, deadline=None)
@given(differences)
def test_wealth_is_never_negative_nor_ruined(ds: list[float]) -> None:
    for side in ("harm", "pass"):
        process = EProcess(side, MARGIN)
        for d in [*ds, -1.0, 1.0]:
            process.update(d)
        assert process.value > 0


@settings(max_examples=30, deadline=None)
@given(differences, differences)
def test_state_survives_a_round_trip_through_json(before: list[float], after: list[float]) -> None:
    for process in (EProcess("harm", MARGIN), EProcess("pass", MARGIN), ECusum(MARGIN)):
        for d in before:
            process.update(d)
        copy = type(process).from_dict(json.loads(json.dumps(process.to_dict())))
        for d in after:
            process.update(d)
            copy.update(d)
        assert copy.value == process.value


def test_many_runs_are_the_same_as_one_by_one() -> None:
    ds = np.random.default_rng(3).uniform(-1, 1, (50, 7))
    together = EProcess("harm", MARGIN, (7,))
    for row in ds:
        together.update(row)
    for i in range(7):
        alone = EProcess("harm", MARGIN)
        for d in ds[:, i]:
            alone.update(float(d))
        assert together.values[i] == pytest.approx(alone.value, rel=1e-12)


def test_endless_evidence_does_not_overflow() -> None:
    process, cusum = EProcess("harm", MARGIN), ECusum(MARGIN)
    for _ in range(5000):
        process.update(1.0)
        cusum.update(1.0)
    assert math.isfinite(process.value)
    assert math.isfinite(cusum.value)


@pytest.mark.parametrize(("side", "margin"), [("harm", 1.0), ("pass", -0.1), ("both", 0.1)])
def test_bad_arguments_are_named(side: str, margin: float) -> None:
    with pytest.raises(ValueError, match=r"side|margin"):
        EProcess(side, margin)


@pytest.mark.parametrize(
    ("module", "others"),
    [
        ("alerts.evidence", "torch litestar duckdb gateway httpx logs"),
        ("alerts.service", "torch litestar gateway.engine gateway.worker"),
    ],
)
def test_dependencies_point_one_way(module: str, others: str) -> None:
    code = f"import sys, {module}; print(*(set({others.split()!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


# --- blocks ---


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), max_size=60), st.randoms())
def test_blocks_depend_on_admission_only_and_lose_nothing(arms: list[bool], random) -> None:
    blocks = Blocks()
    for i, canary in enumerate(arms):
        blocks.admit(str(i), canary)
    order = list(range(len(arms)))
    random.shuffle(order)
    taken: list[tuple[float, float]] = []
    for i in order:
        assert blocks.resolve(str(i), i / 100)
        taken += blocks.take()
    # The same, in order of admission, by hand.
    expected, block = [], []
    for i, canary in enumerate(arms):
        block.append((canary, i / 100))
        if len({c for c, _ in block}) == 2:
            means = [float(np.mean([x for c, x in block if c is arm])) for arm in (True, False)]
            expected.append(means[0] - means[1])
            block = []
    assert [d for d, _ in taken] == pytest.approx(expected)


def test_missing_is_worst_and_never_helps_the_canary_pass() -> None:
    blocks = Blocks()
    for unit, canary in (("a", False), ("b", True), ("c", False), ("d", True)):
        blocks.admit(unit, canary)
    blocks.resolve("a", None)
    blocks.resolve("b", 0.25)
    blocks.resolve("c", 0.5)
    blocks.resolve("d", None)
    assert blocks.take() == [(0.25 - 1.0, 0.25 - 0.0), (1.0 - 0.5, 1.0 - 0.5)]


def test_a_slow_unit_holds_later_blocks_back() -> None:
    blocks = Blocks()
    for unit, canary in (("a", False), ("slow", True), ("c", False), ("d", True)):
        blocks.admit(unit, canary)
    for unit in ("a", "c", "d"):
        blocks.resolve(unit, 0.0)
    assert blocks.take() == []
    copy = Blocks.from_dict(json.loads(json.dumps(blocks.to_dict())))
    for these in (blocks, copy):
        these.resolve("slow", 1.0)
        assert these.take() == [(1.0, 1.0), (0.0, 0.0)]


def test_unknown_and_repeated_units() -> None:
    blocks = Blocks()
    blocks.admit("a", False)
    with pytest.raises(ValueError, match="a"):
        blocks.admit("a", True)
    assert not blocks.resolve("b", 0.0)


# --- losses ---


def test_losses_are_bounded_monotone_and_weights_add_up() -> None:
    assert sum(metric.weight for metric in METRICS) + SCORES_WEIGHT == pytest.approx(1.0)
    assert [agreement_loss(a) for a in (1.0, 0.95, 0.75, 0.0)] == pytest.approx([0.0, 0.2, 1.0, 1.0])
    worse = {
        "agreement": (1.0, 0.9), "mean_logp_large": (-0.1, -0.5), "acceptance": (0.9, 0.5),
        "guard_hits": (0.0, 0.05), "errors": (0, 1), "length": (100, 900), "ttft": (0.1, 1.0),
        "tokens_per_s": (50, 10),
    }  # fmt: skip
    assert set(worse) == set(BY_NAME)
    for name, (good, bad) in worse.items():
        low, high = to_loss(name, good, 100.0), to_loss(name, bad, 100.0)
        assert low is not None
        assert high is not None
        assert 0 <= low < high <= 1, name
        assert to_loss(name, None, 100.0) is None


# --- simulations: 2,000 runs of 3,000 looks, looked at after every one ---


def test_false_rollbacks_without_shift_and_promotion() -> None:
    first = run(Arms(11).blocks(RUNS, LOOKS), RUNS)
    assert share(first["harm"]) <= 0.05
    assert share(first["rollback"]) <= 0.05
    assert share(first["pass"]) >= 0.95
    assert np.median(first["pass"]) < 800


def test_false_rollbacks_and_false_promotions_at_the_boundary() -> None:
    first = run(Arms(12).boundary(RUNS, LOOKS), RUNS)
    assert share(first["harm"]) <= 0.05
    assert share(first["rollback"]) <= 0.05
    assert share(first["pass"]) <= 0.05


def test_five_points_lower_agreement_is_always_found_soon() -> None:
    runs = 500
    first = run(Arms(13).blocks(runs, 1500, shift=0.05), runs)
    assert share(first["rollback"]) == 1.0
    assert np.median(first["harm"]) < 100
    assert np.median(first["rollback"]) < 150
    assert share(first["pass"]) == 0.0


def test_late_drift_is_found_by_the_cusum() -> None:
    runs = 300
    first = run(Arms(14).blocks(runs, LOOKS, shift=0.05, start=1500), runs)
    found = first["drift"][first["drift"] > 1500]
    assert (found < 10**9).mean() >= 0.95
    assert share(first["rollback"]) >= 0.95
    assert np.median(found) - 1500 < 400


class Users:
    """200 sticky users with means N(.1, .06), 64 tokens a request; half of them on the canary.

    One observation a user and window; 30 windows make 3,000 looks of one canary and one stable user.
    """

    def __init__(self, runs: int, seed: int, shift: float = 0.0, start: int = 0, windows: int = 30) -> None:
        rng = np.random.default_rng(seed)
        self.fresh: list[np.ndarray] = []
        self.returning: list[np.ndarray] = []
        self.raw: list[np.ndarray] = []
        means = np.clip(rng.normal(0.1, 0.06, (runs, 200)), 0, 1)
        past = np.zeros((runs, 200))
        for window in range(windows):
            shifts = np.zeros(200)
            shifts[:100] = shift if window >= start else 0.0
            rate = np.clip(means + shifts, 0, 1)
            noise = rng.standard_normal((runs, 200), dtype=np.float32) * np.sqrt(rate * (1 - rate) / 64)
            loss = clipped(rate + noise)
            canary, stable = rng.permutation(100), 100 + rng.permutation(100)
            d = loss[:, canary] - loss[:, stable]
            change = loss - past
            self.raw += list(d.T)
            if window == 0:
                self.fresh += list(d.T)
            else:
                self.returning += list((change[:, canary] - change[:, stable]).T)
            past = (past * window + loss) / (window + 1)

    def rolled_back(self, runs: int) -> np.ndarray:
        harm = EProcess("harm", MARGIN, (runs,))
        cusum, returning = ECusum(MARGIN, runs=(runs,)), ECusum(MARGIN, runs=(runs,))
        hit = np.zeros(runs, dtype=bool)
        for d in self.fresh:
            harm.update(d)
            cusum.update(d)
            hit |= reached(harm.values, cusum.values)
        for d in self.returning:
            returning.update(d)
            hit |= reached(np.ones(runs), cusum.values, returning.values)
        return hit


@pytest.mark.parametrize("shift", [0.0, 0.01])
def test_false_rollbacks_with_200_sticky_users(shift: float) -> None:
    assert Users(RUNS, 21, shift).rolled_back(RUNS).mean() <= 0.05


def test_counting_every_window_of_a_sticky_user_as_new_would_be_wrong() -> None:
    """Why returning keys are kept apart: at the boundary the naive process fails its promise."""
    users, runs = Users(300, 22, 0.01), 300
    naive = run(iter(users.raw), runs)
    assert share(naive["rollback"]) > 0.10


def test_late_drift_of_sticky_users_is_found() -> None:
    assert Users(300, 23, 0.05, start=15).rolled_back(300).mean() >= 0.95


@pytest.mark.parametrize("both_arms", [False, True])
def test_losing_the_worst_audits_never_promotes(both_arms: bool) -> None:
    """The canary's 90 % worst audits are lost (in one variant stable's as well): it must not pass."""
    rng = np.random.default_rng(31)
    for _ in range(10):
        comparison = Comparison(BY_NAME["agreement"])
        n = 800
        losses = clipped(rng.beta(0.64, 7.36, 2 * n))
        cut = {arm: np.quantile(losses[arm::2], 0.1) for arm in (0, 1)}
        for i, loss in enumerate(losses):
            arm = "canary" if i % 2 else "stable"
            lost = loss > cut[i % 2] and (arm == "canary" or both_arms)
            comparison.admit(str(i), arm)
            comparison.resolve(str(i), arm, None if lost else float(loss))
            assert comparison.passing.value < 1 / ALPHA
        if not both_arms:
            assert comparison.harm.value >= 1 / ALPHA
        assert comparison.missing["canary"] > 0.5 * n


@pytest.mark.soak
@pytest.mark.parametrize("stable_per_block", [1, 4, 19])
@pytest.mark.parametrize("mean", [0.02, 0.08, 0.2])
def test_promises_hold_over_traffic_and_weights(stable_per_block: int, mean: float) -> None:
    rng = np.random.default_rng(41)
    pool = rng.beta(8 * mean, 8 * (1 - mean), 1 << 15)
    lost = MARGIN / (1 - clipped(pool).mean())

    def blocks(extra: float) -> Iterator[np.ndarray]:
        for _ in range(LOOKS):
            canary = clipped(pool[rng.integers(0, len(pool), RUNS)])
            stable = clipped(pool[rng.integers(0, len(pool), (stable_per_block, RUNS))]).mean(axis=0)
            yield np.where(rng.random(RUNS) < extra, 1.0, canary) - stable

    still = run(blocks(0.0), RUNS)
    assert share(still["rollback"]) <= 0.05
    edge = run(blocks(lost), RUNS)
    assert share(edge["rollback"]) <= 0.05
    assert share(edge["pass"]) <= 0.05


# --- the combination ---


def feed(evidence: Evidence, n: int, losses: dict[str, tuple[float, float]]) -> None:
    """n pairs of (stable, canary) losses for the named metrics."""
    for i in range(n):
        for arm in ("stable", "canary"):
            for name, pair in losses.items():
                comparison = evidence.comparisons[name]
                comparison.admit(f"{arm}{i}", arm)
                comparison.resolve(f"{arm}{i}", arm, pair[arm == "canary"])


def test_combined_evidence_is_weighted_and_waits_for_min_units() -> None:
    evidence = Evidence([metric.name for metric in METRICS], 0.01, ALPHA)
    feed(evidence, 30, {"agreement": (0.0, 0.8)})
    harm = evidence.comparisons["agreement"].harm.value
    assert evidence.against == pytest.approx(1 + 0.5 * (harm - 1))
    assert evidence.against > evidence.limit
    assert evidence.harmful(min_units=50) == []
    assert evidence.harmful(min_units=30) == ["agreement"]


def test_errors_do_not_wait_for_min_units() -> None:
    evidence = Evidence([metric.name for metric in METRICS], 0.01, ALPHA)
    feed(evidence, 15, {"errors": (0.0, 1.0), "agreement": (0.0, 0.0)})
    assert evidence.harmful(min_units=50) == ["errors"]


def test_every_metric_must_pass() -> None:
    evidence = Evidence(["agreement", "errors"], 0.01, ALPHA)
    feed(evidence, 600, {"agreement": (0.1, 0.1)})
    assert evidence.unproven(50) == ["errors"]
    feed(evidence, 600, {"errors": (0.0, 0.0)})
    assert evidence.unproven(50) == []


def test_task_scores_join_and_share_their_weight() -> None:
    evidence = Evidence(["agreement"], 0.01, ALPHA)
    for i in range(60):
        evidence.score(f"s{i}", "stable", "solved", 1.0)
        evidence.score(f"c{i}", "canary", "solved", 0.0)
    evidence.score("x", "canary", "polite", 1.0)
    assert [c.metric.weight for c in evidence.comparisons.values()] == pytest.approx([0.5, 0.025, 0.05 / 6])
    assert evidence.harmful(50) == ["score:solved"]
    assert "score:polite" not in evidence.unproven(50)


def test_units_until_counts_blocks() -> None:
    ds = np.full((100, 1), 1.0)
    harm, needed = EProcess("harm", MARGIN), 0
    while harm.value < 20:
        harm.update(1.0)
        needed += 1
    assert list(units_until(ds, MARGIN, "harm", ALPHA)) == [needed]
    assert list(units_until(-ds, MARGIN, "harm", ALPHA)) == [101]

"""Which tier runs next: never lockstep, a bounded wait, nobody starves, prefill shares a budget."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core import Tier
from gateway.scheduler import SHORT_FEED, Scheduler


@dataclass
class Waiting:
    tier: Tier
    ready_since: float
    unseen: int = 1
    together: int = 1
    starts: bool = False

    def num_unseen(self, tier: Tier) -> int:
        return self.unseen

    def num_together(self, tier: Tier) -> int:
        return self.together


def small(since: float, **fields: int) -> Waiting:
    return Waiting(Tier.SMALL, since, **fields)


def large(since: float, **fields: int) -> Waiting:
    return Waiting(Tier.LARGE, since, **fields)


S = Scheduler(large_wait_s=0.010, prefill_chunk=256)


def test_nothing_ready_nothing_planned() -> None:
    assert S.plan([], now=1.0) is None


def test_a_tier_runs_over_its_own_rows_only() -> None:
    rows = [small(0.0), large(0.999), small(0.5)]
    plan = S.plan(rows, now=1.0)
    assert (Tier.SMALL, (rows[0], rows[2]), (1, 1)) == (plan.tier, plan.rows, plan.num_tokens)


def test_a_lone_tier_does_not_wait() -> None:
    assert S.plan([large(1.0)], now=1.0).tier is Tier.LARGE
    assert S.plan([small(1.0)], now=1.0).tier is Tier.SMALL


def test_large_rows_gather_until_the_oldest_is_due() -> None:
    rows = [large(1.0), large(1.005), small(1.001)]
    assert S.plan(rows, now=1.009).tier is Tier.SMALL
    due = S.plan(rows, now=1.010)
    assert (due.tier, len(due.rows)) == (Tier.LARGE, 2)


def test_a_first_token_does_not_wait_for_company() -> None:
    rows = [large(1.0), Waiting(Tier.LARGE, 1.005, starts=True), small(1.006)]
    plan = S.plan(rows, now=1.007)
    assert (plan.tier, plan.rows) == (Tier.LARGE, (rows[0], rows[1]))


def test_rows_gather_only_while_that_pays() -> None:
    rows = [large(1.0, unseen=4), large(1.001, unseen=3), small(1.002), small(1.003), small(1.004)]
    asked = []

    def gathers(tokens: int, num_rows: int, drafting: int) -> bool:
        asked.append((tokens, num_rows, drafting))
        return len(asked) < 2

    assert [S.plan(rows, 1.005, gathers).tier for _ in range(2)] == [Tier.SMALL, Tier.LARGE]
    assert asked == [(7, 2, 3)] * 2
    # The deadline asks nobody.
    assert S.plan(rows, 1.011, gathers).tier is Tier.LARGE
    assert len(asked) == 2


def test_once_due_the_older_tier_goes_first() -> None:
    assert S.plan([large(1.0), small(0.9)], now=2.0).tier is Tier.SMALL
    assert S.plan([large(1.0), small(1.1)], now=2.0).tier is Tier.LARGE


def test_a_row_ready_in_the_future_waits_while_others_are_due_but_not_alone() -> None:
    audit, decoding = large(5.0), small(1.0)
    assert S.plan([audit, decoding], now=1.0).rows == (decoding,)
    assert S.plan([audit], now=1.0).rows == (audit,)


def test_the_last_drafts_are_never_split() -> None:
    [row] = rows = [large(0.0, unseen=300, together=9)]
    first = S.plan(rows, now=1.0)
    assert first.num_tokens == (256,)
    row.unseen = 260
    assert S.plan(rows, now=1.0).num_tokens == (251,)
    row.unseen = 256
    assert S.plan(rows, now=1.0).num_tokens == (256,)


rows_of_any_kind = st.lists(
    st.builds(
        Waiting,
        tier=st.sampled_from([Tier.SMALL, Tier.LARGE]),
        ready_since=st.floats(0, 2),
        unseen=st.integers(1, 1000),
        together=st.integers(1, 33),
    ),
    min_size=1,
    max_size=12,
)


@given(rows_of_any_kind, st.integers(1, 600), st.floats(0, 0.1), st.floats(0, 3))
def test_every_plan_keeps_the_rules(rows: list[Waiting], chunk: int, wait: float, now: float) -> None:
    for row in rows:
        row.together = min(row.together, row.unseen)
    plan = Scheduler(wait, chunk).plan(rows, now)
    assert plan.rows
    assert {row.tier for row in plan.rows} == {plan.tier}
    assert len({id(row) for row in plan.rows}) == len(plan.rows)
    fed = list(zip(plan.rows, plan.num_tokens, strict=True))
    assert all(1 <= num <= row.unseen for row, num in fed)
    assert all(num == row.unseen or row.unseen - num >= row.together for row, num in fed)
    assert sum(num for row, num in fed if row.unseen > SHORT_FEED) <= chunk
    due = [row for row in rows if row.ready_since <= now] or rows
    chosen = {id(row) for row in plan.rows}
    assert all(id(r) in chosen for r in due if r.tier is plan.tier and r.unseen <= SHORT_FEED)
    skipped = [r for r in due if r.tier is plan.tier and id(r) not in chosen]
    prefilling = [r for r in plan.rows if r.unseen > SHORT_FEED]
    assert all(p.ready_since <= r.ready_since for p in prefilling for r in skipped)


@given(rows_of_any_kind, st.integers(1, 600), st.floats(0, 0.1), st.data())
@settings(max_examples=30, deadline=None)
def test_every_row_gets_its_turn(rows: list[Waiting], chunk: int, wait: float, data: st.DataObject) -> None:
    """Whatever tier rows turn to after each pass, every row runs within a bounded number of passes."""
    scheduler, now = Scheduler(wait, chunk), 3.0
    # Time enough passes for the large tier's wait to end; then every pass serves the oldest of its tier.
    last_run = {id(row): 0 for row in rows}
    bound = 2 * len(rows) + 2
    for turn in range(1, 40):
        now += 0.1
        plan = scheduler.plan(rows, now)
        for row in plan.rows:
            last_run[id(row)] = turn
            row.ready_since = now
            row.tier = data.draw(st.sampled_from([Tier.SMALL, Tier.LARGE]))
        assert all(turn - last < bound for last in last_run.values())

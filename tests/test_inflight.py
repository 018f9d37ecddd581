"""A large model elsewhere, over scripted models: what comes back when, and what that may not change."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from fakes import (
    Answer,
    Gathered,
    Letters,
    Logits,
    ScriptedModel,
    ask_for,
    check_replay,
    check_tape,
    fake_engine,
    look_and_read,
    near,
    noise_logits,
    spelling,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.cache import BlockPool
from gateway.core import Accept, AuditStatus, FinishReason, Mode, Outcome, Reason, Tier
from gateway.distance import Distance
from gateway.engine import Engine
from gateway.layout import Feed
from gateway.load import CostTable
from gateway.local import local_tiers
from gateway.policy import Policy
from gateway.request import Request
from gateway.scheduler import Scheduler
from gateway.tier import Heard, Job, LargeFailed

VOCAB = 8
END = VOCAB - 1
LARGE = noise_logits(1, VOCAB)
SMALL = near(LARGE, 2, 1.0)


class Far:
    """A scripted model elsewhere: every call waits until it is told to answer. Its own noise is drawn, as an
    engine's would be, from a seed that ours knows nothing of."""

    vocab_size = VOCAB
    available = True

    def __init__(self, logits: Logits) -> None:
        self.logits = logits
        self.under_way: list[tuple[Job, Future[Heard]]] = []
        self.sent: list[Job] = []
        self.fault: LargeFailed | None = None
        self.outcomes: dict[str, int] = {}

    def send(self, job: Job, age_s: float, headers: Mapping[str, str]) -> Future[Heard]:
        assert job.asks
        future: Future[Heard] = Future()
        # The row's list moves on; a call holds what it was sent with.
        kept = Job(job.request_id, job.choice, list(job.sequence), job.start, job.end, job.asks, job.blocks)
        self.sent.append(kept)
        self.under_way.append((kept, future))
        return future

    def close(self) -> None:
        self.under_way.clear()

    def answer(self, i: int = 0) -> None:
        """Let the i-th call under way come back."""
        job, future = self.under_way.pop(i)
        if not future.set_running_or_notify_cancel():
            return
        if self.fault is not None:
            future.set_exception(self.fault)
            return
        model = ScriptedModel(VOCAB, self.logits, 64)
        num = len(job.prefix) + len(job.draft)
        out = model.forward([Feed((0,), 0, list(job.sequence[:num]), len(job.asks))])
        future.set_result(Heard(look_and_read(out.logits, job.asks), 5.0))


def far_engine(small: Logits = SMALL, large: Logits = LARGE, **options: Any) -> tuple[Engine, Far]:
    far, load = Far(large), options.pop("load", None)
    engine = Engine(
        local_tiers({Tier.SMALL: ScriptedModel(VOCAB, small, 64)}),
        Letters(VOCAB),
        BlockPool(64, 64),
        Scheduler(0.0, 512),
        max_rows=64,
        max_model_len=64,
        distant={Tier.LARGE: far},
        load=load,
        **options,
    )
    return engine, far


def run(
    engine: Engine, far: Far, requests: list[Request], pick: Callable[[int], int] = lambda n: 0, lag: int = 3
) -> Gathered:
    """To the end; a call comes back after `lag` ticks, or when nothing else can be done."""
    got, since = Gathered(), 0
    for request in requests:
        engine.check(request)
        engine.add(request)
    for _ in range(20_000):
        if engine.idle:
            break
        since += 1
        if far.under_way and (since >= lag or not engine.runnable):
            far.answer(pick(len(far.under_way)))
            since = 0
        assert engine.runnable or far.under_way, "nobody will ever wake the worker"
        got.take(engine.tick())
    assert engine.idle
    assert not len(engine.flights)
    assert engine.pool.num_free + engine.prefixes.num_blocks == engine.pool.num_blocks, "KV blocks leaked"
    for request in requests:
        check_tape(request, got[request.id, request.choice])
        check_replay(request, got[request.id, request.choice])
    return got


def run_one(engine: Engine, far: Far, request: Request, **how: Any) -> Answer:
    return run(engine, far, [request], **how)[request.id, request.choice]


policies = st.builds(
    Policy,
    accept=st.sampled_from([Accept.EXACT, Accept.THRESHOLD, Accept.TOKEN_V3, Accept.TRUST]),
    threshold=st.sampled_from([0.0, 0.3, 0.6, 1.0]),
    draft_length=st.integers(1, 6),
    protect_first=st.integers(0, 4),
    max_small_run=st.sampled_from([2, 5, 64]),
    lookup=st.booleans(),
    probe_rate=st.sampled_from([0.0, 0.3]),
)


@settings(deadline=None, max_examples=20)
@given(policies, st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 4))
def test_greedy_tokens_are_those_of_the_same_policy_with_both_models_here(
    policy: Policy, seed: int, lag: int, num: int
) -> None:
    """Whatever the order in which calls come back and however far the small model has read ahead, its own or
    copied from another row."""
    opening = [0, 1, 2, 3] * 4
    requests = [
        ask_for(f"r{i}", (*opening, i % 5, 3), policy=policy, max_tokens=20, seed=i) for i in range(num)
    ]
    rng = random.Random(seed)
    got = run(*far_engine(), requests, pick=rng.randrange, lag=lag)
    here = Gathered()
    engine = fake_engine(SMALL, LARGE, vocab_size=VOCAB, guesses=False)
    for request in requests:
        engine.add(request)
    while not engine.idle:
        here.take(engine.tick())
    for request in requests:
        far, near_ = got[request.id, 0], here[request.id, 0]
        assert far.tokens == near_.tokens
        assert [r.outcome for r in far.tape] == [r.outcome for r in near_.tape]
        assert [r.signals for r in far.output] == [r.signals for r in near_.output]


def test_drafts_made_ahead_survive_where_the_bonus_token_is_the_guessed_one() -> None:
    """Models that agree: after the first call every draft has been made by the time it is wanted."""
    request = ask_for(policy=Policy(protect_first=0, threshold=0.0, draft_length=3), max_tokens=16)
    engine, far = far_engine(SMALL, SMALL)
    answer = run_one(engine, far, request, lag=20)
    assert [len(job.draft) for job in far.sent] == [3, 3, 3, 3]
    assert answer.finished is not None
    # 16 positions, and no reading is thrown away: each was read once.
    assert answer.finished.counts.small_passes <= 17
    assert {row.outcome for row in answer.output} == {Outcome.ACCEPTED, Outcome.BONUS}


def test_a_row_reads_ahead_while_its_call_is_under_way_and_not_without_end() -> None:
    request = ask_for(policy=Policy(protect_first=0, threshold=0.0, draft_length=3), max_tokens=30)
    engine, far = far_engine(SMALL, SMALL)
    engine.add(request)
    while engine.runnable:
        engine.tick()
    (row,) = engine.rows
    # The bonus position and a whole round behind it.
    assert (row.flying, len(row.drafts), len(row.ahead)) == (True, 3, 4)
    assert len(far.sent) == 1


def test_rows_do_not_wait_for_each_other() -> None:
    requests = [ask_for(f"r{i}", (i, 2), max_tokens=8) for i in range(3)]
    engine, far = far_engine()
    for request in requests:
        engine.add(request)
    got = Gathered()
    # The first row's call never comes back while the others run to their end.
    for _ in range(500):
        stuck = [i for i, (job, _) in enumerate(far.under_way) if job.request_id != "r0"]
        if stuck:
            far.answer(stuck[0])
        if engine.runnable:
            got.take(engine.tick())
    assert [r.request.id for r in engine.rows] == ["r0"]
    assert all(got[f"r{i}", 0].finished is not None for i in (1, 2))


def test_drafts_for_a_model_elsewhere_are_the_small_models_top_tokens_at_any_temperature() -> None:
    request = ask_for(
        policy=Policy(protect_first=0, threshold=0.0), temperature=1.0, max_tokens=30, num_topk=VOCAB
    )
    answer = run_one(*far_engine(), request)
    drafts = [row for row in answer.tape if row.tier is Tier.SMALL]
    assert drafts
    assert all(row.small_topk is not None and row.token_id == row.small_topk.ids[0] for row in drafts)
    assert len({row.token_id for row in answer.output}) > 2


def test_a_cancelled_row_drops_its_call_and_frees_its_blocks_at_once() -> None:
    engine, far = far_engine()
    engine.add(ask_for())
    while engine.runnable:
        engine.tick()
    _, future = far.under_way[0]
    tick = engine.cancel("r")
    assert tick.deltas[0].finished is not None
    assert tick.deltas[0].finished.reason is FinishReason.ABORT
    assert future.cancelled()
    assert engine.idle
    assert engine.pool.num_free == engine.pool.num_blocks
    # Its answer comes all the same: nobody is there to take it.
    far.answer()
    assert not engine.tick().deltas


def test_stop_strings_and_lengths_end_an_answer_inside_an_accepted_run() -> None:
    said = {0: [1, 2, 3, 4, 5, 6]}
    for changes in ({"stop": ("d",)}, {"max_tokens": 3}, {"stop_token_ids": (3,)}):
        request = ask_for("r", (0,), policy=Policy(protect_first=0), **changes)
        answer = run_one(*far_engine(spelling(said, VOCAB), spelling(said, VOCAB)), request)
        assert answer.text == ("bcd" if "max_tokens" in changes else "bc")


@pytest.mark.parametrize("mode", [Mode.ROUTED, Mode.LARGE_ONLY, Mode.SHADOW])
def test_without_an_answer_a_request_fails_with_what_it_has_and_never_as_if_done(
    mode: Mode,
) -> None:
    request = ask_for(policy=Policy(protect_first=2, mode=mode), max_tokens=30)
    engine, far = far_engine()
    engine.add(request)
    got = Gathered()
    for _ in range(200):
        if len(far.sent) >= 4:
            far.fault = LargeFailed("gone", 7.0)
        if far.under_way:
            far.answer()
        if not engine.idle:
            got.take(engine.tick())
    answer = got["r", 0]
    assert answer.finished is not None
    assert (answer.finished.reason, answer.finished.retry_after_s) == (FinishReason.ERROR, 7.0)
    assert answer.finished.counts.degraded is False
    assert len(answer.tokens) >= 3
    check_tape(request, answer)
    if mode is not Mode.SHADOW:
        # In shadow nothing was decided yet: the small model reads along once the answer is out.
        check_replay(request, answer)


@settings(deadline=None, max_examples=40)
@given(policies, st.integers(0, 12), st.integers(1, 6), st.sampled_from([0.0, 1.0]))
# The small model reads a looked-up draft while that is being verified.
@example(Policy(accept=Accept.TOKEN_V3, threshold=0.3, draft_length=6, protect_first=2), 10, 3, 0.0)
def test_degraded_the_small_model_writes_on_and_every_row_says_so(
    policy: Policy, after: int, lag: int, temperature: float
) -> None:
    request = ask_for(policy=policy, max_tokens=24, temperature=temperature, num_topk=VOCAB)
    engine, far = far_engine(degrades=True)
    engine.add(request)
    got, since = Gathered(), 0
    for _ in range(3000):
        if engine.idle:
            break
        if len(far.sent) > after:
            far.fault = LargeFailed("gone", 1.0)
        since += 1
        if far.under_way and (since >= lag or not engine.runnable):
            far.answer()
            since = 0
        got.take(engine.tick())
    assert engine.idle
    answer = got["r", 0]
    assert answer.finished is not None
    assert answer.finished.reason is FinishReason.LENGTH
    assert len(answer.tokens) == 24
    check_replay(request, answer)
    degraded = [row for row in answer.output if row.reason is Reason.DEGRADED]
    assert answer.finished.counts.degraded == bool(degraded)
    assert all((r.tier, r.outcome, r.draft_limit) == (Tier.SMALL, Outcome.KEPT, -1) for r in degraded)
    assert [r.idx for r in degraded] == list(range(24 - len(degraded), 24))
    assert all(r.signals is not None for r in degraded)


def test_a_request_that_the_engine_refuses_is_not_degraded() -> None:
    engine, far = far_engine(degrades=True)
    far.fault = LargeFailed("prompt too long", None)
    engine.add(ask_for())
    got = Gathered()
    while not engine.idle:
        if far.under_way:
            far.answer()
        got.take(engine.tick())
    done = got["r", 0].finished
    assert done is not None
    assert (done.reason, done.retry_after_s, done.counts.degraded) == (FinishReason.ERROR, None, False)


def test_labels_of_trusted_tokens_are_asked_for_after_the_answer_bit_by_bit() -> None:
    policy = Policy(protect_first=0, accept=Accept.TRUST, threshold=0.0, audit_rate=1.0, max_small_run=500)
    request = ask_for(max_tokens=60, policy=policy)
    answer = run_one(*far_engine(), replace(request, audited=True))
    assert answer.audit is AuditStatus.COMPLETE
    assert Counter(r.outcome for r in answer.output)[Outcome.KEPT] > 40


def costs(small_ms: float, call_ms: float) -> dict[Tier, CostTable]:
    return {
        Tier.SMALL: CostTable((1, 64), (small_ms, small_ms)),
        Tier.LARGE: CostTable((1, 33), (call_ms, call_ms + 3.2)),
    }


def test_the_longer_the_round_trip_the_more_drafts_a_call_carries() -> None:
    best = [Distance(costs(2.0, call)).best(1)[0] for call in (1.0, 5.0, 20.0, 80.0)]
    assert best == sorted(best)
    assert best[0] < best[-1]
    here = Distance(costs(2.0, 5.0))
    before = here.best(1)[0]
    for _ in range(60):
        here.saw_call(90.0, 4, 1)
    assert here.best(1)[0] > before


def test_what_one_bad_answer_switched_off_is_drafted_again_some_day() -> None:
    load = Distance(costs(10.0, 80.0))
    for _ in range(100):
        load.saw_proposal(False)
        load.saw_verified(Tier.SMALL, 0, 1)
    load.saw_call(80.0, 1, 1)
    assert load.cap(1) == 0
    for _ in range(1000):
        load.saw_call(80.0, 1, 1)
    assert load.cap(1) > 0


def test_where_drafting_takes_longer_than_it_saves_none_is_made() -> None:
    assert Distance(costs(50.0, 10.0)).cap(1) == 0

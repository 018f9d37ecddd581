"""The decode loop: schedule -> run -> decide or accept -> commit, one tier's pass a tick.

What happens to a token. The small model proposes x; `policy.decide` keeps or defers it. Kept tokens wait as
drafts (under `trust` they stand at once). When a round ends, the large model reads every token it has not
seen in one pass, which verifies the drafts and yields one token more: recovered after a rejection, bonus
after a full draft, or the deferred one (rounds.py). Only committed tokens leave; every decision becomes a
Step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

import structlog

from gateway.admission import Admission
from gateway.cache import BlockPool
from gateway.commit import end
from gateway.core import (
    AuditStatus,
    Counts,
    Delta,
    Finished,
    FinishReason,
    Mode,
    PassRecord,
    Settled,
    Tick,
    Tier,
    Timings,
)
from gateway.distance import Distance
from gateway.inflight import InFlight, Landed
from gateway.load import Load
from gateway.lookup import AnswerStore
from gateway.prefix import PrefixCache
from gateway.request import Request
from gateway.rounds import Rounds, View
from gateway.row import Output, PassStamp, Row
from gateway.scheduler import SHORT_FEED, Plan, Scheduler
from gateway.sharing import Sharing
from gateway.text import Tokenizer
from gateway.tier import Distant, Job, LargeFailed, Scorer

log = structlog.get_logger(__name__)

AUDIT_PATIENCE_S = 0.5
"""How long an answered row's labels give way to rows whose clients still wait."""

MOST_ASKED = 64
"""Positions that one call to a tier elsewhere is asked about."""


class Engine:
    """Rows, tiers, one block pool. Single-threaded: call everything from one thread.

    distant: tiers elsewhere; a row's job goes out on its own, and meanwhile the small model drafts on
    (draft_ahead).
    ride_along: what the small model says where it defers is read by the large model along with the drafts
    (None: where load tells when that pays).
    guesses: so is what it says in advance where the large model writes anyway, in the protected prefix.
    degrades: when such a tier gives no answer, the small model writes on; else the request fails.
    load: caps drafts by what they are worth (None: drafts are never capped). answers: earlier answers to look
    tokens up in (None: only the row's own text). prefixes: finished rows whose keys and values may be reused,
    as those of running ones always are.
    """

    def __init__(
        self,
        tiers: Mapping[Tier, Scorer],
        tokenizer: Tokenizer,
        pool: BlockPool,
        scheduler: Scheduler,
        *,
        max_rows: int,
        max_model_len: int,
        load: Load | None = None,
        answers: AnswerStore | None = None,
        prefixes: PrefixCache | None = None,
        distant: Mapping[Tier, Distant] | None = None,
        degrades: bool = False,
        draft_ahead: bool = True,
        ride_along: bool | None = False,
        guesses: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.tiers = dict(tiers)
        self.distant = dict(distant or {})
        self.degrades = degrades
        self.draft_ahead = draft_ahead
        self.flights = InFlight()
        sizes = [tier.vocab_size for tier in self.tiers.values()]
        self.vocab_size = min(sizes + [tier.vocab_size for tier in self.distant.values()])
        self.tokenizer = tokenizer
        self.pool = pool
        self.scheduler = scheduler
        self.max_rows = max_rows
        self.max_model_len = max_model_len
        self.load = load
        self.answers = answers
        self.prefixes = PrefixCache(0) if prefixes is None else prefixes
        self.clock = clock
        self.waiting: deque[tuple[Request, Timings]] = deque()
        self.rows: list[Row] = []
        self.admission = Admission(self.tiers, tokenizer, pool, self.prefixes, max_model_len, self.distant)
        self.sharing = Sharing(self.tiers, None if load is None else load.costs)
        rides = load is not None if ride_along is None else ride_along
        self.rounds = Rounds(self.rows, load, answers, clock, ride_along=rides, guesses=guesses)
        self.num_ticks = 0
        self.num_passes = 0
        self._full = False
        self._last_end = time.perf_counter()

    @property
    def idle(self) -> bool:
        """Whether there is nobody to serve."""
        return not self.rows and not self.waiting

    @property
    def runnable(self) -> bool:
        """Whether a tick would do something now; if not, until an answer from elsewhere lands."""
        return self.flights.landed or bool(self.waiting and not self._full) or bool(self._near())

    def check(self, request: Request) -> None:
        """Raise ValueError when the request can never be served here."""
        if not request.prompt_ids or len(request.prompt_ids) >= self.max_model_len:
            raise ValueError(
                f"prompt has {len(request.prompt_ids)} tokens; 1 to {self.max_model_len - 1} fit"
            )
        sampling = request.sampling
        if sampling.max_tokens < 1:
            raise ValueError(f"max_tokens is {sampling.max_tokens}; at least 1 is needed")
        # One id that no model knows would fail the whole pass, and with it every row in it.
        named = {
            "prompt": request.prompt_ids,
            "logit_bias": [token for token, _ in sampling.logit_bias],
            "stop_token_ids": sampling.stop_token_ids,
            "forced tokens": [token for token, _ in request.forced],
        }
        for name, tokens in named.items():
            if any(not 0 <= token < self.vocab_size for token in tokens):
                raise ValueError(f"{name}: a token id is outside the vocabulary of {self.vocab_size}")
        if not self.admission.fits_ever(request):
            raise ValueError(f"request {request.id} needs more KV cache than there is")

    def add(self, request: Request) -> None:
        """Queue a request that `check` let pass."""
        if not self.runnable:
            self._last_end = time.perf_counter()
        self.waiting.append((request, Timings(received=request.received)))

    def cancel(self, request_id: str) -> Tick:
        """End every choice of a request now; its blocks are free when this returns."""
        tick = Tick(self.num_ticks)
        for request, timings in [w for w in self.waiting if w[0].id == request_id]:
            self.waiting.remove((request, timings))
            timings.finished = self.clock()
            done = Finished(FinishReason.ABORT, Counts(), timings)
            tick.deltas.append(Delta(request.id, request.choice, "", (), done))
            lost = AuditStatus.LOST if request.audited else AuditStatus.NOT_CHOSEN
            tick.settled.append(Settled(request.id, request.choice, lost))
        for row in [r for r in self.rows if r.request.id == request_id]:
            self._break_off(row, FinishReason.ABORT, None, tick)
        return tick

    def tick(self) -> Tick:
        """Admit what fits, take an answer that has landed or run one pass, commit what it settles."""
        self.num_ticks += 1
        tick = Tick(self.num_ticks)
        self.rounds.count()
        self._admit(tick)
        self._send_off(tick)
        landed = self.flights.take()
        if landed is not None:
            self._land(landed, tick)
        else:
            self._pass(tick)
        self._send_off(tick)
        return tick

    def _pass(self, tick: Tick) -> None:
        gathers = None if self.load is None else self.load.gathers
        plan = self.scheduler.plan(self.sharing.ready(self._near()), self.clock(), gathers)
        if plan is None:
            return
        try:
            views, stamp = self._run(plan, tick)
        except Exception as error:
            log.exception("pass_failed", tier=plan.tier, rows=len(plan.rows))
            for row in plan.rows:
                self._break_off(row, FinishReason.ERROR, str(error), tick)
            return
        unread = [max(0, row.num_prompt - row.seen[plan.tier]) for row in plan.rows]
        # All of them first: one that ends leaves the others what they have not read.
        for row, num in zip(plan.rows, plan.num_tokens, strict=True):
            row.seen[plan.tier] += num
        for row, said in zip(plan.rows, views, strict=True):
            self._hear(plan.tier, row, said, stamp, tick)
        if self.load is not None and tick.passed is not None and max(plan.num_tokens) <= SHORT_FEED:
            # An answer's first token comes with reading the prompt, routed or not.
            first = sum(0 < left <= num for left, num in zip(unread, plan.num_tokens, strict=True))
            written = sum(len(delta.steps) for delta in tick.deltas)
            written = max(0, written - first) if plan.tier is Tier.LARGE else written
            prompt = sum(map(min, unread, plan.num_tokens))
            spent = tick.passed.ms + tick.passed.host_ms
            fed, decoding = sum(plan.num_tokens), self.rounds.num_decoding
            self.load.saw_pass(plan.tier, spent, fed, written, decoding, prompt)

    def _hear(self, tier: Tier, row: Row, views: list[View], stamp: PassStamp, tick: Tick) -> None:
        """What becomes of a row after a tier has spoken."""
        out = Output()
        self.rounds.after(tier, row, row.take_prompt(views), stamp, out, tick)
        row.ready_since = self.clock()
        if out.steps:
            tick.deltas.append(out.delta(row))
        if row.finished is not None:
            self._settle(row, tick)

    def _admit(self, tick: Tick) -> None:
        self._full = False
        while self.waiting:
            fits = len(self.rows) < self.max_rows
            row = self.admission.admit(*self.waiting[0], self.clock()) if fits else None
            if row is None:
                self._full = True
                return
            row.drafts_ahead = self.draft_ahead and Tier.LARGE in self.distant
            # A grammar's mask behind a token is known only once that token stands.
            row.rides = Tier.LARGE in self.tiers and len(row.levels) == 1 and row.constraint is None
            row.greedy_drafts = Tier.LARGE in self.distant and row.request.policy.verified
            self.waiting.popleft()
            self.sharing.join(row, self.rows)
            self.rows.append(row)
            self.rounds.count()
            out = Output()
            self.rounds.begin(row, out, tick)
            if out.steps:
                tick.deltas.append(out.delta(row))
            if row.finished is not None:
                self._settle(row, tick)

    def _break_off(
        self,
        row: Row,
        reason: FinishReason,
        error: str | None,
        tick: Tick,
        retry_after_s: float | None = None,
    ) -> None:
        """End a row where it stands; one already finished just loses its last signals and labels."""
        if row.finished is None:
            out = Output()
            self.rounds.discard(row, row.drafts, tick)
            end(row, reason, out, self.clock, error=error, retry_after_s=retry_after_s)
            tick.deltas.append(out.delta(row))
        self._let_go(row, tick)

    # ---- elsewhere

    def _near(self) -> list[Row]:
        """Rows that a tier here can take forward now."""
        return [row for row in self.rows if row.near]

    def _send_off(self, tick: Tick) -> None:
        """Every row that waits for a tier elsewhere is asked about there, whatever the others do."""
        if not self.distant:
            return
        for row in [r for r in self.rows if not r.flying and r.tier in self.distant]:
            name, start = row.tier, row.seen[row.tier]
            num = row.num_unseen(name)
            # Long arrears of labels are asked for bit by bit.
            num -= max(0, row.num_wanted(name, num) - MOST_ASKED)
            job = self._job(row, name, start, start + num)
            row.tier = Tier.SMALL
            try:
                self.flights.send(self.distant[name], row, job, self.clock() - row.request.received)
            except LargeFailed as fault:
                self._fail(row, fault, tick)

    def _land(self, landed: Landed, tick: Tick) -> None:
        """A tier elsewhere has answered for one row, or has failed it."""
        row, job, heard = landed.row, landed.job, landed.heard
        if heard is None:
            self._fail(row, landed.fault, tick)
            return
        row.tier = Tier.LARGE
        row.seen[row.tier] = job.end
        self._last_end = time.perf_counter()
        stamp = self._record(tick, row.tier, [job], heard.ms, 0.0, adapted=row.load_cap == 0)
        row.counts.large_passes += 1
        if isinstance(self.load, Distance):
            self.load.saw_call(heard.ms, len(job.asks), self.rounds.num_decoding)
        views = [(ask.position, reading) for ask, reading in zip(job.asks, heard.readings, strict=True)]
        self._hear(row.tier, row, views, stamp, tick)

    def _fail(self, row: Row, fault: Exception | None, tick: Tick) -> None:
        """No answer will come: the small model writes on where that is wanted, else the request fails."""
        passes = isinstance(fault, LargeFailed) and fault.retry_after_s is not None
        if passes and self.degrades and row.finished is None and row.request.policy.mode is Mode.ROUTED:
            log.warning("large_model_unavailable", request_id=row.request.id, why=str(fault))
            self.rounds.degrade(row, tick)
            return
        log.error("large_model_failed", request_id=row.request.id, why=str(fault))
        wait_s = fault.retry_after_s if isinstance(fault, LargeFailed) else None
        self._break_off(row, FinishReason.ERROR, f"the large model: {fault}", tick, wait_s)

    # ---- one pass

    def _job(self, row: Row, tier: Tier, start: int, end: int) -> Job:
        wanted = row.num_wanted(tier, end - start)
        first = end - wanted + 1 - row.num_prompt
        asks = [row.ask(tier, first + i) for i in range(wanted)]
        return Job(row.request.id, row.request.choice, row.to_read(tier), start, end, asks, row.blocks)

    def _run(self, plan: Plan[Row], tick: Tick) -> tuple[list[list[View]], PassStamp]:
        jobs = []
        for row, num in zip(plan.rows, plan.num_tokens, strict=True):
            start = row.seen[plan.tier]
            jobs.append(self._job(row, plan.tier, start, start + num))
        readings, ms = self.tiers[plan.tier].score(jobs)
        views = [
            [(ask.position, reading) for ask, reading in zip(job.asks, said, strict=True)]
            for job, said in zip(jobs, readings, strict=True)
        ]
        ended = time.perf_counter()
        host_ms = (ended - self._last_end) * 1e3 - ms
        self._last_end = ended
        stamp = self._record(tick, plan.tier, jobs, ms, host_ms, any(row.load_cap == 0 for row in plan.rows))
        for row in plan.rows:
            if plan.tier is Tier.SMALL:
                row.counts.small_passes += 1
            elif plan.tier is Tier.LARGE:
                row.counts.large_passes += 1
            else:
                row.counts.middle_passes = (row.counts.middle_passes or 0) + 1
        return views, stamp

    def _record(
        self, tick: Tick, tier: Tier, jobs: list[Job], ms: float, host_ms: float, adapted: bool
    ) -> PassStamp:
        """Note a pass for the tape."""
        self.num_passes += 1
        now = self.clock()
        tick.passed = PassRecord(
            pass_id=self.num_passes,
            tick=tick.number,
            tier=tier,
            rows=len(jobs),
            tokens=sum(job.end - job.start for job in jobs),
            context_tokens=sum(job.start for job in jobs),
            ms=ms,
            host_ms=host_ms,
            adapted=adapted,
            ts=now,
        )
        return PassStamp(tick.number, self.num_passes, len(jobs), int(ms * 1e3), now)

    # ---- endings

    def _settle(self, row: Row, tick: Tick) -> None:
        """Let an answered row go, unless its steps lack signals, or labels where it is audited."""
        row.forget_ahead()
        if row.load_cap == 0:
            # While routing does not pay, neither does a small pass that only completes the tape.
            row.forgo_signals()
        tier = row.afterwards
        if tier is None:
            self._let_go(row, tick)
            return
        row.tier = tier
        if tier is Tier.LARGE:
            # Nobody waits for labels: for a while they run only when no other row is ready.
            row.ready_since += AUDIT_PATIENCE_S

    def _let_go(self, row: Row, tick: Tick) -> None:
        self.rows.remove(row)
        self.flights.drop(row)
        row.forget_ahead()
        self._full = False
        if self.answers is not None and row.request.policy.lookup:
            self.answers.add(row.request.scope, row.sequence[row.num_prompt :])
        self.sharing.leave(row)
        self.admission.release(row)
        tick.settled.append(Settled(row.request.id, row.request.choice, row.audit))

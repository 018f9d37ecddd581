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
    PassRecord,
    Settled,
    Tick,
    Tier,
    Timings,
)
from gateway.load import Load
from gateway.lookup import AnswerStore
from gateway.prefix import PrefixCache
from gateway.request import Request
from gateway.rounds import Rounds, View
from gateway.row import Output, PassStamp, Row
from gateway.scheduler import SHORT_FEED, Plan, Scheduler
from gateway.text import Tokenizer
from gateway.tier import Job, Scorer

log = structlog.get_logger(__name__)

AUDIT_PATIENCE_S = 0.5
"""How long an answered row's labels give way to rows whose clients still wait."""


class Engine:
    """Rows, tiers, one block pool. Single-threaded: call everything from one thread.

    load: caps drafts by what they are worth (None: drafts are never capped). answers: earlier answers to look
    tokens up in (None: only the row's own text). prefixes: finished rows whose keys and values may be reused.
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
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.tiers = dict(tiers)
        self.vocab_size = min(tier.vocab_size for tier in tiers.values())
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
        self.admission = Admission(self.tiers, tokenizer, pool, self.prefixes, max_model_len)
        self.rounds = Rounds(self.rows, load, answers, clock)
        self.num_ticks = 0
        self.num_passes = 0
        self._last_end = time.perf_counter()

    @property
    def idle(self) -> bool:
        """Whether a tick would do nothing."""
        return not self.rows and not self.waiting

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
        if self.idle:
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
        """Admit what fits, run one pass, commit what it settles."""
        self.num_ticks += 1
        tick = Tick(self.num_ticks)
        self._admit(tick)
        plan = self.scheduler.plan(self.rows, self.clock())
        if plan is None:
            return tick
        try:
            views, stamp = self._run(plan, tick)
        except Exception as error:
            log.exception("pass_failed", tier=plan.tier, rows=len(plan.rows))
            for row in plan.rows:
                self._break_off(row, FinishReason.ERROR, str(error), tick)
            return tick
        for row, num, said in zip(plan.rows, plan.num_tokens, views, strict=True):
            out = Output()
            row.seen[plan.tier] += num
            self.rounds.after(plan.tier, row, row.take_prompt(said), stamp, out, tick)
            row.ready_since = self.clock()
            if out.steps:
                tick.deltas.append(out.delta(row))
            if row.finished is not None:
                self._settle(row, tick)
        if self.load is not None and tick.passed is not None and max(plan.num_tokens) <= SHORT_FEED:
            written = sum(len(delta.steps) for delta in tick.deltas)
            spent = tick.passed.ms + tick.passed.host_ms
            self.load.saw_pass(plan.tier, spent, sum(plan.num_tokens), written, self.rounds.num_decoding)
        return tick

    def _admit(self, tick: Tick) -> None:
        while self.waiting and len(self.rows) < self.max_rows:
            row = self.admission.admit(*self.waiting[0], self.clock())
            if row is None:
                return
            self.waiting.popleft()
            self.rows.append(row)
            out = Output()
            self.rounds.begin(row, out, tick)
            if out.steps:
                tick.deltas.append(out.delta(row))
            if row.finished is not None:
                self._settle(row, tick)

    def _break_off(self, row: Row, reason: FinishReason, error: str | None, tick: Tick) -> None:
        """End a row where it stands; one already finished just loses its last signals and labels."""
        if row.finished is None:
            out = Output()
            self.rounds.discard(row, row.drafts, tick)
            end(row, reason, out, self.clock, error=error)
            tick.deltas.append(out.delta(row))
        self._let_go(row, tick)

    # ---- one pass

    def _run(self, plan: Plan[Row], tick: Tick) -> tuple[list[list[View]], PassStamp]:
        jobs = []
        for row, num in zip(plan.rows, plan.num_tokens, strict=True):
            start = row.seen[plan.tier]
            wanted = row.num_wanted(plan.tier, num)
            first = start + num - wanted + 1 - row.num_prompt
            asks = [row.ask(plan.tier, first + i) for i in range(wanted)]
            request = row.request
            jobs.append(Job(request.id, request.choice, row.sequence, start, start + num, asks, row.blocks))
        readings, ms = self.tiers[plan.tier].score(jobs)
        views = [
            [(ask.position, reading) for ask, reading in zip(job.asks, said, strict=True)]
            for job, said in zip(jobs, readings, strict=True)
        ]
        ended = time.perf_counter()
        self.num_passes += 1
        now = self.clock()
        tick.passed = PassRecord(
            pass_id=self.num_passes,
            tick=tick.number,
            tier=plan.tier,
            rows=len(plan.rows),
            tokens=sum(plan.num_tokens),
            context_tokens=sum(job.start for job in jobs),
            ms=ms,
            host_ms=(ended - self._last_end) * 1e3 - ms,
            adapted=any(row.load_cap == 0 for row in plan.rows),
            ts=now,
        )
        self._last_end = ended
        for row in plan.rows:
            if plan.tier is Tier.SMALL:
                row.counts.small_passes += 1
            elif plan.tier is Tier.LARGE:
                row.counts.large_passes += 1
            else:
                row.counts.middle_passes = (row.counts.middle_passes or 0) + 1
        return views, PassStamp(tick.number, self.num_passes, len(plan.rows), int(ms * 1e3), now)

    # ---- endings

    def _settle(self, row: Row, tick: Tick) -> None:
        """Let an answered row go, unless its steps lack signals, or labels where it is audited."""
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
        if self.answers is not None and row.request.policy.lookup:
            self.answers.add(row.request.scope, row.sequence[row.num_prompt :])
        self.admission.release(row)
        tick.settled.append(Settled(row.request.id, row.request.choice, row.audit))

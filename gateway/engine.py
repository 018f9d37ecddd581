"""The decode loop: schedule -> run -> decide or accept -> commit, one tier's pass a tick.

What happens to a token. The small model proposes x; `policy.decide` keeps or defers it. Kept tokens wait as
drafts (under `trust` they stand at once). When a round ends, the large model reads every token it has not
seen in one pass, which verifies the drafts and yields one token more: recovered after a rejection, bonus
after a full draft, or the deferred one. Only committed tokens leave; every decision becomes a Step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import structlog
from torch import Tensor

from gateway.accept import num_accepted
from gateway.cache import BlockPool
from gateway.core import (
    Action,
    AuditStatus,
    Counts,
    Delta,
    Finished,
    FinishReason,
    Mode,
    Outcome,
    PassRecord,
    Reason,
    Settled,
    Signals,
    Step,
    Tick,
    Tier,
    Timings,
    TopK,
)
from gateway.models import Feed
from gateway.policy import Decision, History, Policy, State, decide
from gateway.request import Request
from gateway.row import Output, PassStamp, Proposal, Row
from gateway.sampling import Reading, read
from gateway.scheduler import Plan, Scheduler
from gateway.text import TextStream, Tokenizer

log = structlog.get_logger(__name__)

View = tuple[int, Reading]
"""An output position and what a model says there."""

AUDIT_PATIENCE_S = 0.5
"""How long an answered row's labels may wait for a large pass that runs anyway."""


class Model(Protocol):
    """What the engine needs of a model; gateway.models.CausalLM, and fakes in tests."""

    vocab_size: int

    def forward(self, feeds: list[Feed]) -> Tensor: ...


class Engine:
    """Rows, two models, one block pool. Single-threaded: call everything from one thread."""

    def __init__(
        self,
        small: Model,
        large: Model,
        tokenizer: Tokenizer,
        pool: BlockPool,
        scheduler: Scheduler,
        *,
        max_rows: int,
        max_model_len: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.models = {Tier.SMALL: small, Tier.LARGE: large}
        # Padded heads differ in size within one family; ids beyond the shorter one stand for no token.
        self.vocab_size = min(small.vocab_size, large.vocab_size)
        self.tokenizer = tokenizer
        self.pool = pool
        self.scheduler = scheduler
        self.max_rows = max_rows
        self.max_model_len = max_model_len
        self.clock = clock
        self.waiting: deque[tuple[Request, Timings]] = deque()
        self.rows: list[Row] = []
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
        if not self._fits_ever(request):
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
            if row.finished is None:
                out = Output()
                self._end(row, FinishReason.ABORT, out)
                tick.deltas.append(out.delta(row))
            self._let_go(row, tick)
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
                self._fail(row, str(error), tick)
            return tick
        after = self._after_small if plan.tier is Tier.SMALL else self._after_large
        for row, num, said in zip(plan.rows, plan.num_tokens, views, strict=True):
            out = Output()
            row.seen[plan.tier] += num
            after(row, said, stamp, out, tick)
            row.ready_since = self.clock()
            if out.steps:
                tick.deltas.append(out.delta(row))
            if row.finished is not None:
                self._settle(row, tick)
        return tick

    def _fail(self, row: Row, error: str, tick: Tick) -> None:
        """A pass broke: its rows end with an error; one already finished just loses its last signals."""
        if row.finished is None:
            out = Output()
            self._end(row, FinishReason.ERROR, out, error=error)
            tick.deltas.append(out.delta(row))
        self._let_go(row, tick)

    # ---- admission

    def _fits_ever(self, request: Request) -> bool:
        return self.pool.blocks_for(self._longest(request)) <= self.pool.num_blocks

    def _longest(self, request: Request) -> int:
        return min(len(request.prompt_ids) + request.sampling.max_tokens, self.max_model_len)

    def _admit(self, tick: Tick) -> None:
        while self.waiting and len(self.rows) < self.max_rows:
            request, timings = self.waiting[0]
            if not self.pool.can_allocate(self._longest(request)):
                return
            self.waiting.popleft()
            timings.admitted = self.clock()
            sampling = request.sampling
            row = Row(
                request=request,
                history=History(request.policy),
                text=TextStream(
                    self.tokenizer,
                    stop=sampling.stop,
                    include_stop=sampling.include_stop_str_in_output,
                    skip_special_tokens=sampling.skip_special_tokens,
                ),
                blocks=self.pool.allocate(self._longest(request)),
                max_len=self.max_model_len,
                timings=timings,
                ready_since=timings.admitted,
                sequence=list(request.prompt_ids),
            )
            self.rows.append(row)
            if request.policy.mode is Mode.SHADOW:
                row.shadowed = History(request.policy)
            if request.forced:
                self._force(row, tick)
            else:
                row.route()

    def _force(self, row: Row, tick: Tick) -> None:
        """Write a fork's given tokens; both models' views of them are filled in by their first passes."""
        out, mode = Output(), row.request.policy.mode
        stamp = PassStamp(tick.number, 0, 0, 0, self.clock())
        for token, tier in row.request.forced:
            state = row.history.state(None, row.draft_limit)
            step = self._step(row, token, tier, Outcome.FORCED, None, state, stamp)
            if tier is Tier.LARGE:
                row.history.resolve(0, token)
            else:
                row.history.keep(token)
            row.sequence.append(token)
            row.owe(step, signals=mode.runs_small, label=mode.runs_large)
            self._write(row, step, out, tick)
            if row.finished is not None:
                self._settle(row, tick)
                break
        else:
            row.route()
        tick.deltas.append(out.delta(row))

    # ---- one pass

    def _run(self, plan: Plan[Row], tick: Tick) -> tuple[list[list[View]], PassStamp]:
        feeds, asks = [], []
        for row, num in zip(plan.rows, plan.num_tokens, strict=True):
            start = row.seen[plan.tier]
            wanted = row.num_wanted(plan.tier, num)
            feeds.append(Feed(row.blocks, start, row.sequence[start : start + num], wanted))
            first = start + num - wanted + 1 - row.num_prompt
            asks.append([row.ask(plan.tier, first + i, self.tokenizer.eos_ids) for i in range(wanted)])
        began = time.perf_counter()
        logits = self.models[plan.tier].forward(feeds)[:, : self.vocab_size]
        ms = (time.perf_counter() - began) * 1e3
        flat = iter(read(logits, [ask for row_asks in asks for ask in row_asks]))
        views = [[(ask.position, next(flat)) for ask in row_asks] for row_asks in asks]
        ended = time.perf_counter()
        self.num_passes += 1
        now = self.clock()
        tick.passed = PassRecord(
            pass_id=self.num_passes,
            tick=tick.number,
            tier=plan.tier,
            rows=len(plan.rows),
            tokens=sum(plan.num_tokens),
            context_tokens=sum(feed.start for feed in feeds),
            ms=ms,
            host_ms=(ended - self._last_end) * 1e3 - ms,
            adapted=False,
            ts=now,
        )
        self._last_end = ended
        for row in plan.rows:
            if plan.tier is Tier.SMALL:
                row.counts.small_passes += 1
            else:
                row.counts.large_passes += 1
        return views, PassStamp(tick.number, self.num_passes, len(plan.rows), int(ms * 1e3), now)

    # ---- the small model has spoken

    def _after_small(self, row: Row, views: list[View], stamp: PassStamp, out: Output, tick: Tick) -> None:
        for position, reading in views:
            seq = row.unsignalled.pop(position, None)
            if seq is not None:
                tick.restated.append(self._signal(row, seq, reading))
            elif row.finished is None and position == len(row.history.tokens):
                self._propose(row, reading, stamp, out, tick)

    def _signal(self, row: Row, seq: int, reading: Reading) -> Step:
        """A written step learns what the small model says at its position."""
        learnt = _small_view(reading.token, reading.signals, reading.topk)
        large = row.open[seq].large_choice
        if large is not None:
            learnt |= {"audit_agrees": reading.token == large, "audit_source": "verify"}
        if row.shadowed is not None:
            learnt |= self._shadow(row, row.shadowed, row.open[seq], reading)
        return row.restate(seq, **learnt)

    def _shadow(self, row: Row, history: History, step: Step, reading: Reading) -> dict[str, Any]:
        """What routing would have decided here, had the text been the same."""
        policy = row.request.policy
        left = row.request.sampling.max_tokens - step.idx
        limit = min(policy.draft_length, max(1, left - 1)) if policy.verified else policy.draft_length
        state = history.state(reading.token, limit, row.probe_u(step.idx))
        decision = decide(policy, state, reading.signals)
        history.shadow(decision, reading.token, step.token_id)
        return {**_decided(policy, decision), **_state_columns(state), "audit_source": "shadow"}

    def _propose(self, row: Row, reading: Reading, stamp: PassStamp, out: Output, tick: Tick) -> None:
        policy = row.request.policy
        state = row.history.state(reading.token, row.draft_limit, row.probe_u(len(row.history.tokens)))
        decision = decide(policy, state, reading.signals)
        proposal = Proposal(
            reading.token,
            reading.signals,
            reading.topk,
            state,
            decision,
            stamp,
            row.seen[Tier.SMALL],
            row.seen[Tier.LARGE],
        )
        if decision.reason is Reason.LOOP_GUARD:
            row.counts.guard_hits += 1
        if decision.action is Action.DEFER:
            row.deferred, row.tier = proposal, Tier.LARGE
            return
        row.sequence.append(proposal.token)
        if policy.verified and decision.reason is not Reason.BUDGET:
            row.drafts.append(proposal)
            row.history.draft(proposal.token)
        else:
            row.history.keep(proposal.token)
            step = self._proposal_step(row, proposal, Outcome.KEPT, None)
            row.owe(step, signals=False, label=True)
            self._write(row, step, out, tick)
        if row.finished is None:
            row.route()

    # ---- the large model has spoken

    def _after_large(self, row: Row, views: list[View], stamp: PassStamp, out: Output, tick: Tick) -> None:
        rest = []
        for position, reading in views:
            seq = row.unlabelled.pop(position, None)
            if seq is None:
                rest.append(reading)
            else:
                tick.restated.append(self._label(row, seq, reading))
        if row.finished is None and len(rest) == len(row.drafts) + 1:
            self._resolve(row, rest, stamp, out, tick)

    def _label(self, row: Row, seq: int, reading: Reading) -> Step:
        """A written step learns what the large model says at its position."""
        small = row.open[seq].small_choice
        learnt: dict[str, Any] = {
            "large_topk": reading.topk,
            "large_choice": reading.token,
            "p_large": reading.p_draft,
            "audit_source": "catchup" if row.finished is None else "posthoc",
        }
        if small is not None:
            learnt["audit_agrees"] = small == reading.token
        return row.restate(seq, **learnt)

    def _resolve(self, row: Row, readings: list[Reading], stamp: PassStamp, out: Output, tick: Tick) -> None:
        """Accept a prefix of the drafts, then write the large model's own token behind it."""
        drafts = list(row.drafts)
        num = num_accepted(row.request.policy, [d.token for d in drafts], readings)
        if drafts:
            row.counts.num_drafts += 1
            row.counts.num_draft_tokens += len(drafts)
        for i in range(num):
            row.counts.num_accepted_draft_tokens += 1
            self._write(row, self._proposal_step(row, drafts[i], Outcome.ACCEPTED, readings[i]), out, tick)
            if row.finished is not None:
                self._discard(row, drafts[i + 1 :], tick)
                row.history.resolve(i + 1, None)
                row.drop_drafts(i + 1)
                return
        large = readings[num]
        if num < len(drafts):
            tick.steps.append(self._proposal_step(row, drafts[num], Outcome.REJECTED, large))
            self._discard(row, drafts[num + 1 :], tick)
            step = self._recovered_step(row, drafts[num], large, stamp)
        else:
            step = self._large_step(row, large, stamp)
        row.history.resolve(num, large.token)
        row.drop_drafts(num)
        row.sequence.append(large.token)
        row.owe(step, signals=step.signals is None and row.request.policy.mode.runs_small, label=False)
        self._write(row, step, out, tick)
        row.round += 1
        if row.finished is None:
            row.route()

    def _discard(self, row: Row, drafts: list[Proposal], tick: Tick) -> None:
        """Record what was proposed behind the last position that counts, the deferred proposal included."""
        late = [*drafts, row.deferred] if row.deferred is not None else drafts
        tick.steps.extend(self._proposal_step(row, p, Outcome.DISCARDED, None) for p in late)

    # ---- steps

    def _proposal_step(self, row: Row, p: Proposal, outcome: Outcome, large: Reading | None) -> Step:
        step = self._step(row, p.token, Tier.SMALL, outcome, p.decision, p.state, p.stamp)
        step = replace(
            step, **_small_view(p.token, p.signals, p.topk), small_kv=p.small_kv, large_kv=p.large_kv
        )
        return step if large is None else replace(step, **_large_view(p.token, p.token, large))

    def _recovered_step(self, row: Row, rejected: Proposal, large: Reading, stamp: PassStamp) -> Step:
        step = self._step(row, large.token, Tier.LARGE, Outcome.RECOVERED, None, rejected.state, stamp)
        return replace(
            step,
            **_small_view(rejected.token, rejected.signals, rejected.topk),
            **_large_view(large.token, rejected.token, large),
        )

    def _large_step(self, row: Row, large: Reading, stamp: PassStamp) -> Step:
        """The token at the position where the round ended: bonus after a full draft, else deferred."""
        if row.deferred is not None:
            decision, state = row.deferred.decision, row.deferred.state
        elif row.early is not None:
            decision, state = row.early
        else:
            raise AssertionError("a large pass ended a round that nobody ended")
        outcome = Outcome.BONUS if decision.reason is Reason.DRAFT_FULL and row.drafts else Outcome.LARGE
        step = self._step(row, large.token, Tier.LARGE, outcome, decision, state, stamp)
        p = row.deferred
        step = replace(step, **_large_view(large.token, None if p is None else p.token, large))
        return step if p is None else replace(step, **_small_view(p.token, p.signals, p.topk))

    def _step(
        self,
        row: Row,
        token: int,
        tier: Tier,
        outcome: Outcome,
        decision: Decision | None,
        state: State,
        stamp: PassStamp,
    ) -> Step:
        step = Step(
            request_id=row.request.id,
            choice=row.request.choice,
            seq=row.seq,
            round=row.round,
            tick=stamp.tick,
            token_id=token,
            token_bytes=self.tokenizer.token_bytes(token),
            tier=tier,
            **_decided(row.request.policy, decision),
            **_state_columns(state),
            signals=None,
            small_choice=None,
            small_topk=None,
            large_topk=None,
            p_large=None,
            large_choice=None,
            outcome=outcome,
            audit_agrees=None,
            audit_source=None,
            pass_id=stamp.pass_id,
            batch_rows=stamp.rows,
            small_kv=row.seen[Tier.SMALL],
            large_kv=row.seen[Tier.LARGE],
            latency_us=stamp.latency_us,
            ts=stamp.ts,
        )
        row.seq += 1
        return step

    def _write(self, row: Row, step: Step, out: Output, tick: Tick) -> None:
        """Commit one token: count it, turn it into text, and see whether it ends the answer."""
        tick.steps.append(step)
        out.steps.append(step)
        counts = row.counts
        if step.tier is Tier.LARGE:
            counts.large_tokens += 1
            counts.protected_tokens += step.reason is Reason.PROTECTED_PREFIX
        else:
            counts.small_tokens += 1
        if row.timings.first_token is None:
            row.timings.first_token = self.clock()
        sampling = row.request.sampling
        stops = step.token_id in sampling.stop_token_ids
        ends = not sampling.ignore_eos and step.token_id in self.tokenizer.eos_ids
        if not (stops or ends) or sampling.include_stop_str_in_output:
            out.text.append(row.text.push(step.token_id))
        if stops or ends:
            self._end(row, FinishReason.STOP, out, stop=step.token_id if stops else None)
        elif row.text.stopped is not None:
            self._end(row, FinishReason.STOP, out, stop=row.text.stopped)
        elif counts.completion_tokens >= sampling.max_tokens or row.num_prompt + step.idx + 1 >= row.max_len:
            self._end(row, FinishReason.LENGTH, out)

    # ---- endings

    def _end(
        self,
        row: Row,
        reason: FinishReason,
        out: Output,
        *,
        stop: str | int | None = None,
        error: str | None = None,
    ) -> None:
        """Say how the answer ended and release what text was held back."""
        row.timings.finished = self.clock()
        row.finished = out.finished = Finished(reason, row.counts, row.timings, stop, error)
        out.text.append(row.text.flush())

    def _settle(self, row: Row, tick: Tick) -> None:
        """Let an answered row go, unless its steps lack signals, or labels where it is audited."""
        tier = row.afterwards
        if tier is None:
            self._let_go(row, tick)
            return
        row.tier = tier
        if tier is Tier.LARGE:
            # Labels can wait a little for a pass that runs anyway; nobody waits for them.
            row.ready_since += AUDIT_PATIENCE_S

    def _let_go(self, row: Row, tick: Tick) -> None:
        self.rows.remove(row)
        self.pool.release(row.blocks)
        tick.settled.append(Settled(row.request.id, row.request.choice, row.audit))


def _decided(policy: Policy, decision: Decision | None) -> dict[str, Any]:
    """The columns of a decision; null where a token was written without one."""
    if decision is None:
        return {"action": None, "reason": None, "score": None, "threshold": None, "propensity": None}
    propensity = None
    if policy.probe_rate and decision.reason in (Reason.PROBE, Reason.CONFIDENT):
        propensity = policy.probe_rate if decision.reason is Reason.PROBE else 1 - policy.probe_rate
    return {
        "action": decision.action,
        "reason": decision.reason,
        "score": decision.score,
        "threshold": None if decision.score is None else policy.threshold,
        "propensity": propensity,
    }


def _state_columns(state: State) -> dict[str, Any]:
    return {name: getattr(state, name) for name in State.__dataclass_fields__}


def _small_view(token: int, signals: Signals, topk: TopK) -> dict[str, Any]:
    return {"signals": signals, "small_choice": token, "small_topk": topk}


def _large_view(token: int, proposed: int | None, large: Reading) -> dict[str, Any]:
    """What the large model says of the row's token; proposed: the small model's own, if it made one."""
    return {
        "large_topk": large.topk,
        "large_choice": large.token,
        "p_large": large.p_token if token == large.token else large.p_draft,
        "audit_agrees": None if proposed is None else proposed == large.token,
        "audit_source": None if proposed is None else "verify",
    }

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
    Step,
    Tick,
    Tier,
    Timings,
)
from gateway.layout import Feed, Forward
from gateway.load import Load
from gateway.lookup import AnswerStore, NgramIndex
from gateway.policy import History, decide, decide_lookup
from gateway.prefix import Kept, PrefixCache
from gateway.request import Request
from gateway.row import Output, PassStamp, Proposal, Row
from gateway.sampling import Reading, read
from gateway.scheduler import SHORT_FEED, Plan, Scheduler
from gateway.steps import (
    decided,
    large_step,
    new_step,
    proposal_step,
    recovered_step,
    small_view,
    state_columns,
)
from gateway.text import TextStream, Tokenizer

log = structlog.get_logger(__name__)

View = tuple[int, Reading]
"""An output position and what a model says there."""

AUDIT_PATIENCE_S = 0.5
"""How long an answered row's labels give way to rows whose clients still wait."""


class Model(Protocol):
    """What the engine needs of a model; gateway.models.CausalLM, and fakes in tests."""

    @property
    def vocab_size(self) -> int: ...

    def forward(self, feeds: list[Feed]) -> Forward: ...

    def copy_prefix(self, source: tuple[int, ...], target: tuple[int, ...], length: int) -> None: ...


class Engine:
    """Rows, two models, one block pool. Single-threaded: call everything from one thread.

    load: caps drafts by what they are worth (None: drafts are never capped). answers: earlier answers to look
    tokens up in (None: only the row's own text). prefixes: finished rows whose keys and values may be reused.
    """

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
        load: Load | None = None,
        answers: AnswerStore | None = None,
        prefixes: PrefixCache | None = None,
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
        self.load = load
        self.answers = answers
        self.prefixes = PrefixCache(0) if prefixes is None else prefixes
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
        after = self._after_small if plan.tier is Tier.SMALL else self._after_large
        for row, num, said in zip(plan.rows, plan.num_tokens, views, strict=True):
            out = Output()
            row.seen[plan.tier] += num
            after(row, row.take_prompt(said), stamp, out, tick)
            row.ready_since = self.clock()
            if out.steps:
                tick.deltas.append(out.delta(row))
            if row.finished is not None:
                self._settle(row, tick)
        if self.load is not None and tick.passed is not None and max(plan.num_tokens) <= SHORT_FEED:
            written = sum(len(delta.steps) for delta in tick.deltas)
            spent = tick.passed.ms + tick.passed.host_ms
            self.load.saw_pass(plan.tier, spent, sum(plan.num_tokens), written, self.num_decoding)
        return tick

    @property
    def num_decoding(self) -> int:
        """Rows whose client still waits."""
        return sum(row.finished is None for row in self.rows)

    def _break_off(self, row: Row, reason: FinishReason, error: str | None, tick: Tick) -> None:
        """End a row where it stands; one already finished just loses its last signals and labels."""
        if row.finished is None:
            out = Output()
            self._discard(row, row.drafts, tick)
            self._end(row, reason, out, error=error)
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
            if not self._make_room(self._longest(request)):
                return
            self.waiting.popleft()
            timings.admitted = self.clock()
            sampling = request.sampling
            row = Row(
                request=request,
                history=History(request.policy),
                tokenizer=self.tokenizer,
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
            self._reuse_prefix(row)
            if request.policy.mode is Mode.SHADOW:
                row.shadowed = History(request.policy)
            if request.policy.mode is Mode.ROUTED and request.policy.lookup:
                row.lookup = NgramIndex(request.prompt_ids)
            if request.constraint is not None:
                row.constraint = request.constraint()
            if request.forced:
                self._force(row, tick)
            else:
                self._route(row)

    def _make_room(self, length: int) -> bool:
        """Whether a row of `length` fits, finished rows' kept blocks given up for it if need be."""
        while not self.pool.can_allocate(length) and len(self.prefixes):
            self.pool.release(self.prefixes.evict())
        return self.pool.can_allocate(length)

    def _reuse_prefix(self, row: Row) -> None:
        if row.request.prompt_logprobs:
            return
        found = self.prefixes.find(row.request.scope, row.request.prompt_ids)
        if found is None:
            return
        kept, num = found
        for tier, model in self.models.items():
            # The last prompt token is always read anew: its logits decide the first output token.
            length = min(num, kept.seen[tier], row.num_prompt - 1)
            model.copy_prefix(kept.blocks, row.blocks, length)
            row.seen[tier] = length

    def _force(self, row: Row, tick: Tick) -> None:
        """Write a fork's given tokens; both models' views of them are filled in by their first passes."""
        out, mode = Output(), row.request.policy.mode
        stamp = PassStamp(tick.number, 0, 0, 0, self.clock())
        for token, tier in row.request.forced:
            state = row.history.state(None, row.draft_limit)
            step = new_step(row, token, tier, Outcome.FORCED, None, state, stamp)
            if tier is Tier.LARGE:
                row.history.resolve(0, token)
            else:
                row.history.keep(token)
            row.append(token)
            row.owe(step, signals=mode.runs_small, label=mode.runs_large)
            self._write(row, step, out, tick)
            if row.finished is not None:
                self._settle(row, tick)
                break
        else:
            self._route(row)
        tick.deltas.append(out.delta(row))

    # ---- one pass

    def _run(self, plan: Plan[Row], tick: Tick) -> tuple[list[list[View]], PassStamp]:
        feeds, asks = [], []
        for row, num in zip(plan.rows, plan.num_tokens, strict=True):
            start = row.seen[plan.tier]
            wanted = row.num_wanted(plan.tier, num)
            feeds.append(Feed(row.blocks, start, row.sequence[start : start + num], wanted))
            first = start + num - wanted + 1 - row.num_prompt
            asks.append([row.ask(plan.tier, first + i) for i in range(wanted)])
        began = time.perf_counter()
        logits, attn_entropy = self.models[plan.tier].forward(feeds)
        ms = (time.perf_counter() - began) * 1e3
        logits = logits[:, : self.vocab_size]
        flat = iter(read(logits, [ask for row_asks in asks for ask in row_asks], attn_entropy))
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
            adapted=any(row.load_cap == 0 for row in plan.rows),
            ts=now,
        )
        self._last_end = ended
        for row in plan.rows:
            if plan.tier is Tier.SMALL:
                row.counts.small_passes += 1
            else:
                row.counts.large_passes += 1
        return views, PassStamp(tick.number, self.num_passes, len(plan.rows), int(ms * 1e3), now)

    # ---- what comes next

    def _route(self, row: Row) -> None:
        """Decide the next position as far as that needs no model; look up what may be drafted for free."""
        policy = row.request.policy
        if self.load is not None and policy.mode is Mode.ROUTED:
            row.load_cap = self.load.cap_for(self.num_decoding, row.num_unseen(Tier.SMALL), row.num_left)
            row.counts.adapted |= row.load_cap < policy.draft_length
        row.route()
        if row.lookup is not None and not row.drafts and self._look_up(row, row.lookup):
            row.route()

    def _look_up(self, row: Row, index: NgramIndex) -> bool:
        """Draft what followed the last tokens before, while the rules allow it; whether there was any."""
        policy, history = row.request.policy, row.history
        most = min(policy.draft_length, row.num_left - 1)
        if self.load is not None:
            most = min(most, self.load.lookup_cap(self.num_decoding))
        if most < 1:
            return False
        tokens = index.propose(row.sequence, most)
        if not tokens and self.answers is not None:
            tokens = self.answers.propose(row.request.scope, row.sequence, most)
        stamp = PassStamp(self.num_ticks, 0, 0, 0, self.clock())
        for token in tokens:
            position = len(history.tokens)
            state = history.state(token, most, row.probe_u(position))
            decision = decide_lookup(policy, state)
            if decision is None or not row.permits(token):
                break
            seen = row.seen
            row.drafts.append(
                Proposal(
                    Tier.LOOKUP, token, None, None, state, decision, stamp, seen[Tier.SMALL], seen[Tier.LARGE]
                )
            )
            history.draft(token)
            row.append(token)
        row.lookup_full = bool(row.drafts)
        return row.lookup_full

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
        learnt = small_view(reading.token, reading.signals, reading.topk)
        large = row.open[seq].large_choice
        if large is not None:
            learnt |= {"audit_agrees": reading.token == large, "audit_source": "verify"}
        if row.shadowed is not None:
            learnt |= self._shadow(row, row.shadowed, row.open[seq], reading)
        return row.restate(seq, **learnt)

    def _shadow(self, row: Row, history: History, step: Step, reading: Reading) -> dict[str, Any]:
        """What routing would have decided here, had the text been the same."""
        policy = row.request.policy
        left = row.most_tokens - history.num_written
        limit = min(policy.draft_length, max(1, left - 1)) if policy.verified else policy.draft_length
        fact = row.fact_value(step.idx, reading.token)
        state = history.state(reading.token, limit, row.probe_u(step.idx), fact)
        decision = decide(policy, state, reading.signals)
        history.shadow(decision, reading.token, step.token_id)
        return {**decided(policy, decision), **state_columns(state), "audit_source": "shadow"}

    def _propose(self, row: Row, reading: Reading, stamp: PassStamp, out: Output, tick: Tick) -> None:
        policy = row.request.policy
        position = len(row.history.tokens)
        fact = row.fact_value(position, reading.token)
        state = row.history.state(reading.token, row.draft_limit, row.probe_u(position), fact)
        decision = decide(policy, state, reading.signals)
        proposal = Proposal(
            Tier.SMALL,
            reading.token,
            reading.signals,
            reading.topk,
            state,
            decision,
            stamp,
            row.seen[Tier.SMALL],
            row.seen[Tier.LARGE],
        )
        if decision.reason in (Reason.LOOP_GUARD, Reason.FACT_GUARD):
            row.counts.guard_hits += 1
        if self.load is not None and policy.mode is Mode.ROUTED:
            self.load.saw_proposal(decision.action is Action.KEEP)
        if decision.action is Action.DEFER:
            row.deferred, row.tier = proposal, Tier.LARGE
            return
        row.append(proposal.token)
        if policy.verified and decision.reason is not Reason.BUDGET:
            row.drafts.append(proposal)
            row.history.draft(proposal.token)
        else:
            row.history.keep(proposal.token)
            step = proposal_step(row, proposal, Outcome.KEPT, None)
            row.owe(step, signals=False, label=True)
            self._write(row, step, out, tick)
        if row.finished is None:
            self._route(row)

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
            if self.load is not None:
                self.load.saw_verified(drafts[0].tier, num, min(num + 1, len(drafts)))
        for i in range(num):
            row.counts.num_accepted_draft_tokens += 1
            step = proposal_step(row, drafts[i], Outcome.ACCEPTED, readings[i])
            row.owe(step, signals=step.signals is None, label=False)
            self._write(row, step, out, tick)
            if row.finished is not None:
                self._discard(row, drafts[i + 1 :], tick)
                row.history.resolve(i + 1, None)
                row.drop_drafts(i + 1)
                return
        large = readings[num]
        if num < len(drafts):
            tick.steps.append(proposal_step(row, drafts[num], Outcome.REJECTED, large))
            self._discard(row, drafts[num + 1 :], tick)
            step = recovered_step(row, drafts[num], large, stamp)
        else:
            step = large_step(row, large, stamp)
        row.history.resolve(num, large.token)
        row.drop_drafts(num)
        row.append(large.token)
        lacks = step.signals is None and row.request.policy.mode.runs_small
        row.owe(step, signals=lacks and step.reason is not Reason.LOAD, label=False)
        self._write(row, step, out, tick)
        row.round += 1
        if row.finished is None:
            self._route(row)

    def _discard(self, row: Row, drafts: list[Proposal], tick: Tick) -> None:
        """Record what was proposed behind the last position that counts, the deferred proposal included."""
        late = [*drafts, row.deferred] if row.deferred is not None else drafts
        tick.steps.extend(proposal_step(row, p, Outcome.DISCARDED, None) for p in late)

    # ---- commit

    def _write(self, row: Row, step: Step, out: Output, tick: Tick) -> None:
        """Commit one token: count it, turn it into text, and see whether it ends the answer."""
        tick.steps.append(step)
        out.steps.append(step)
        counts = row.counts
        if step.tier is Tier.LARGE:
            counts.large_tokens += 1
            counts.protected_tokens += step.reason is Reason.PROTECTED_PREFIX
        elif step.tier is Tier.SMALL:
            counts.small_tokens += 1
        else:
            counts.lookup_tokens += 1
        if row.lookup is not None:
            row.lookup.extend((step.token_id,))
        if row.timings.first_token is None:
            row.timings.first_token = self.clock()
        sampling = row.request.sampling
        stops = step.token_id in sampling.stop_token_ids
        ends = not sampling.ignore_eos and step.token_id in self.tokenizer.eos_ids
        if not (stops or ends) or sampling.include_stop_str_in_output:
            may_stop = step.idx + 1 >= sampling.min_tokens
            out.text.append(row.text.push(step.token_id, may_stop=may_stop))
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
        row.finished = out.finished = Finished(reason, replace(row.counts), row.timings, stop, error)
        out.text.append(row.text.flush())

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
        longest = max(row.seen.values())
        num = self.pool.blocks_for(longest)
        self.pool.release(row.blocks[num:])
        kept = Kept(row.request.scope, tuple(row.sequence[:longest]), row.blocks[:num], dict(row.seen))
        for blocks in self.prefixes.keep(kept):
            self.pool.release(blocks)
        tick.settled.append(Settled(row.request.id, row.request.choice, row.audit))

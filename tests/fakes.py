"""Stand-ins for what is slow or random: models with scripted logits, a tokenizer of letters, a clock."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any

import torch

from gateway.cache import BlockPool
from gateway.core import (
    MIDDLES,
    AuditStatus,
    Delta,
    Finished,
    FinishReason,
    Mode,
    Outcome,
    Sampling,
    Step,
    Tick,
    Tier,
)
from gateway.engine import Engine
from gateway.layout import Feed, Forward
from gateway.local import local_tiers
from gateway.policy import Policy, f32
from gateway.recorded import COLUMNS
from gateway.replay import replay
from gateway.request import Request
from gateway.sampling import Ask, Reading, look, read
from gateway.scheduler import Scheduler
from gateway.summary import by_torch
from logs.rows import Capture, step_table

Logits = Callable[[tuple[int, ...]], Sequence[float]]
"""Next-token logits as a function of the whole context."""


@dataclass
class Clock:
    """Time that moves only when told to, or by `step` at every look."""

    now: float = 1000.0
    step: float = 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


class Letters:
    """A tokenizer whose token i is the i-th letter; the last id is the end of text."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = frozenset({vocab_size - 1})
        self.special_ids = self.eos_ids

    def token_bytes(self, token_id: int) -> bytes:
        return b"<end>" if token_id in self.eos_ids else bytes([ord("a") + token_id])

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if not (skip_special_tokens and i in self.special_ids)]
        return b"".join(self.token_bytes(i) for i in kept).decode()


class ScriptedModel:
    """A model whose "KV cache" is the tokens themselves, kept by (block, offset).

    The context of each position is read back from that store, so a wrong block, start or roll-back shows as
    a wrong answer. Reading a position that was never written is an error.
    """

    def __init__(self, vocab_size: int, logits: Logits, block_size: int = 64) -> None:
        self.vocab_size = vocab_size
        self.summarize = by_torch
        self.logits = logits
        self.block_size = block_size
        self.store: dict[tuple[int, int], int] = {}
        self.feeds: list[list[Feed]] = []
        self.error: Exception | None = None

    def forward(self, feeds: Sequence[Feed]) -> Forward:
        self.feeds.append(list(feeds))
        if self.error is not None:
            raise self.error
        out: list[Sequence[float]] = []
        for feed in feeds:
            end = feed.start + len(feed.tokens)
            for position, token in zip(range(feed.start, end), feed.tokens, strict=True):
                self.store[self._at(feed, position)] = token
            context = tuple(self.store[self._at(feed, p)] for p in range(end))
            out += [self.logits(context[: p + 1]) for p in range(end - feed.num_logits, end)]
        logits = torch.tensor(out, dtype=torch.float32).reshape(len(out), self.vocab_size)
        # Two numbers that hang on the context stand for a hidden state.
        return Forward(logits, torch.zeros(len(out)), logits[:, :2] - logits[:, 1:3])

    def copy_prefix(self, source: tuple[int, ...], target: tuple[int, ...], length: int) -> None:
        for p in range(length):
            block, offset = p // self.block_size, p % self.block_size
            self.store[target[block], offset] = self.store[source[block], offset]

    def _at(self, feed: Feed, position: int) -> tuple[int, int]:
        return feed.blocks[position // self.block_size], position % self.block_size


def look_and_read(logits: torch.Tensor, asks: Sequence[Ask], *more: torch.Tensor | None) -> list[Reading]:
    """Both halves of reading logits, as a tier does them; more: attention entropies, hidden states."""
    return read(logits, asks, look(logits, asks, *more))


def noise_logits(seed: int, vocab_size: int, *, memory: int = 3, scale: float = 2.0) -> Logits:
    """Random but fixed logits that depend on the last `memory` tokens; the end of text never comes."""
    known: dict[tuple[int, ...], list[float]] = {}

    def logits(context: tuple[int, ...]) -> list[float]:
        key = context[-memory:]
        if key not in known:
            rng = random.Random(f"{seed}:{key}")
            known[key] = [scale * rng.gauss(0, 1) for _ in range(vocab_size - 1)] + [-1e9]
        return known[key]

    return logits


def near(logits: Logits, seed: int, amount: float = 1.0) -> Logits:
    """Logits close to another model's: the same plus fixed noise."""
    known: dict[tuple[int, ...], list[float]] = {}

    def noisy(context: tuple[int, ...]) -> list[float]:
        key = context[-4:]
        if key not in known:
            rng = random.Random(f"{seed}:{key}")
            known[key] = [amount * rng.gauss(0, 1) for _ in range(100)]
        return [a + b for a, b in zip(logits(context), known[key], strict=False)]

    return noisy


def spelling(answers: dict[int, Sequence[int]], vocab_size: int, confidence: float = 9.0) -> Logits:
    """A model that continues a prompt [p] with answers[p], letter by letter, then ends."""

    def logits(context: tuple[int, ...]) -> list[float]:
        answer, at = answers[context[0]], len(context) - 1
        token = answer[at] if at < len(answer) else vocab_size - 1
        return [confidence if i == token else 0.0 for i in range(vocab_size)]

    return logits


def fake_engine(
    small: Logits,
    large: Logits,
    *,
    middles: Sequence[Logits] = (),
    vocab_size: int = 8,
    num_blocks: int = 64,
    block_size: int = 64,
    max_rows: int = 64,
    max_model_len: int = 64,
    large_wait_s: float = 0.0,
    prefill_chunk: int = 512,
    clock: Callable[[], float] | None = None,
    tokenizer: Any = None,
    **options: Any,
) -> Engine:
    """An engine over scripted models."""
    said = {Tier.SMALL: small, **dict(zip(MIDDLES, middles, strict=False)), Tier.LARGE: large}
    return Engine(
        local_tiers({tier: ScriptedModel(vocab_size, logits, block_size) for tier, logits in said.items()}),
        tokenizer or Letters(vocab_size),
        BlockPool(num_blocks, block_size),
        Scheduler(large_wait_s, prefill_chunk),
        max_rows=max_rows,
        max_model_len=max_model_len,
        clock=clock or Clock(step=1e-3),
        **options,
    )


def ask_for(
    id: str = "r",
    prompt: Sequence[int] = (0, 1),
    *,
    choice: int = 0,
    policy: Policy | None = None,
    max_tokens: int = 16,
    seed: int = 1,
    temperature: float = 0.0,
    num_topk: int = 2,
    **sampling: Any,
) -> Request:
    """A request; greedy and without a protected prefix unless told otherwise."""
    return Request(
        id=id,
        choice=choice,
        prompt_ids=tuple(prompt),
        sampling=Sampling(max_tokens=max_tokens, seed=seed, temperature=temperature, **sampling),
        policy=policy or Policy(protect_first=0),
        policy_name="stable",
        received=1000.0,
        num_topk=num_topk,
    )


@dataclass
class Answer:
    """What one choice's client and tape got."""

    text: str = ""
    written: list[Step] = field(default_factory=list)
    rows: dict[int, Step] = field(default_factory=dict)
    finished: Finished | None = None
    audit: AuditStatus | None = None
    """How it settled; None while it has not."""

    @property
    def tokens(self) -> list[int]:
        return [step.token_id for step in self.written]

    @property
    def tape(self) -> list[Step]:
        """All rows in seq order, in their last restated form."""
        return [self.rows[seq] for seq in sorted(self.rows)]

    @property
    def output(self) -> list[Step]:
        """The rows of the tape that are the output, in their last form."""
        return [step for step in self.tape if step.written]

    def take(self, delta: Delta) -> None:
        assert self.finished is None, "a delta after the last one"
        self.text += delta.text
        self.written += delta.steps
        self.finished = delta.finished


class Gathered(dict[tuple[str, int], Answer]):
    """Answers by (request id, choice), gathered from ticks."""

    def __missing__(self, key: tuple[str, int]) -> Answer:
        self[key] = Answer()
        return self[key]

    def take(self, tick: Tick) -> None:
        for step in tick.steps:
            answer = self[step.request_id, step.choice]
            assert step.seq not in answer.rows, "a row was written twice"
            answer.rows[step.seq] = step
        for step in tick.restated:
            answer = self[step.request_id, step.choice]
            was = answer.rows[step.seq]
            same = ("token_id", "idx", "outcome", "tier", "round")
            assert [getattr(step, f) for f in same] == [getattr(was, f) for f in same]
            answer.rows[step.seq] = step
        for delta in tick.deltas:
            self[delta.request_id, delta.choice].take(delta)
        for choice in tick.settled:
            answer = self[choice.request_id, choice.choice]
            assert answer.finished is not None, "settled before its end"
            assert answer.audit is None, "settled twice"
            answer.audit = choice.audit


def decode(engine: Engine, requests: Sequence[Request], max_ticks: int = 5000) -> Gathered:
    """Run requests to their end, together, and check what must hold of every answer."""
    got = Gathered()
    for request in requests:
        engine.check(request)
        engine.add(request)
    for _ in range(max_ticks):
        if engine.idle:
            break
        got.take(engine.tick())
    assert engine.idle, "the engine did not finish"
    kept = engine.prefixes.num_blocks
    assert engine.pool.num_free + kept == engine.pool.num_blocks, "KV blocks leaked"
    for request in requests:
        answer = got[request.id, request.choice]
        check_tape(request, answer)
        check_replay(request, answer)
        assert answer.finished is not None
        assert answer.finished.error is None
    return got


def check_tape(request: Request, answer: Answer) -> None:
    """What the tape of any answer must satisfy, whatever the mode, the rule and the company."""
    policy, done, rows = request.policy, answer.finished, answer.tape
    assert done is not None
    assert answer.audit is not None, "never settled"
    assert [row.seq for row in rows] == list(range(len(rows)))
    output = answer.output
    assert [row.token_id for row in output] == answer.tokens
    assert [row.idx for row in output] == list(range(len(output)))
    counts = done.counts
    by_tier = Counter(row.tier for row in output)
    assert (counts.small_tokens, counts.large_tokens, counts.lookup_tokens) == tuple(
        by_tier[t] for t in (Tier.SMALL, Tier.LARGE, Tier.LOOKUP)
    )
    assert (counts.middle_tokens or 0) == sum(by_tier[t] for t in MIDDLES)
    assert counts.completion_tokens == len(output) <= request.sampling.max_tokens
    drafts = [row for row in rows if row.outcome in (Outcome.ACCEPTED, Outcome.REJECTED)]
    for row in drafts:
        assert (row.overruled_by is not None) == (row.outcome is Outcome.REJECTED)
    drafts = [row for row in drafts if row.overruled_by in (None, Tier.LARGE)]
    assert counts.num_accepted_draft_tokens == sum(row.outcome is Outcome.ACCEPTED for row in drafts)
    assert counts.num_draft_tokens >= len(drafts)

    for row in rows:
        large_saw_it = row.overruled_by in (None, Tier.LARGE)
        if row.outcome is Outcome.REJECTED and large_saw_it:
            after = next(r for r in rows if r.seq > row.seq and r.outcome is not Outcome.DISCARDED)
            assert (after.outcome, after.idx, after.round) == (Outcome.RECOVERED, row.idx, row.round)
        if row.tier is Tier.LARGE and row.outcome is not Outcome.FORCED:
            assert row.token_id == row.large_choice
        if row.tier is Tier.SMALL and row.outcome is not Outcome.FORCED:
            assert row.token_id == row.small_choice
        if large_saw_it and row.outcome in (
            Outcome.ACCEPTED,
            Outcome.REJECTED,
            Outcome.RECOVERED,
            Outcome.BONUS,
            Outcome.LARGE,
        ):
            assert row.p_large is not None
            assert row.large_topk is not None
        assert (row.action is None) == (row.reason is None)
        numbers = [row.ema_acceptance, row.guard_value, row.score, row.p_large, row.probe_u]
        if row.signals is not None:
            numbers += [row.signals.top1_p, row.signals.gap, row.signals.entropy]
        assert all(x is None or f32(x) == x for x in numbers), "not a float32"
    if policy.mode is Mode.ROUTED:
        forced = sum(row.outcome is Outcome.FORCED for row in output)
        assert all(row.tier is Tier.LARGE for row in output[forced : max(forced, policy.protect_first)])
        if policy.large_token_budget is None:
            runs = [
                len(list(g)) for large, g in groupby(row.tier is Tier.LARGE for row in output) if not large
            ]
            assert max(runs, default=0) <= max(policy.max_small_run, forced)
        else:
            assert counts.large_tokens <= policy.large_token_budget
    ended_well = done.reason in (FinishReason.STOP, FinishReason.LENGTH)
    # While load caps drafts to none, nor does the small model read along just for the tape.
    if ended_well and policy.mode.runs_small and not counts.adapted:
        for row in output:
            assert row.signals is not None
            assert row.small_choice is not None
            assert row.small_topk is not None
    if answer.audit is AuditStatus.COMPLETE:
        assert all(row.large_choice is not None for row in output)


def check_replay(request: Request, answer: Answer) -> None:
    """Every decision and every state of the tape follows from the rows before it (gateway.replay)."""
    rows = step_table(answer.tape, [1] * len(answer.rows), Capture.FULL).select(COLUMNS)
    about = {"request_id": request.id, "choice": request.choice, "policy": asdict(request.policy)}
    replayed = replay(about, rows)
    assert replayed.mismatches == []
    decided = sum(row.action is not None for row in answer.tape)
    decided += sum(view.action is not None for row in answer.tape for view in row.middle)
    assert replayed.decisions == decided


def decode_one(engine: Engine, request: Request) -> Answer:
    """Run one request alone."""
    return decode(engine, [request])[request.id, request.choice]


def with_policy(request: Request, **changes: Any) -> Request:
    """The request under a changed policy."""
    return replace(request, policy=replace(request.policy, **changes))

"""A scripted engine: writes rows by the tape's conventions, from a policy, without any model.

It does not use History: positions, runs, acceptance and n-gram counts are kept here in their own, plainer
way, so that replay is checked against a second account of the same rules.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, field

from msgspec.structs import replace

from gateway.core import (
    Action,
    Counts,
    Finished,
    FinishReason,
    Mode,
    Outcome,
    PassRecord,
    Reason,
    Sampling,
    Signals,
    Step,
    Tick,
    Tier,
    Timings,
    TopK,
)
from gateway.policy import Policy
from gateway.request import Request, Served, Trace

SERVED = Served(
    small_model="s",
    large_model="l",
    small_hash="a1",
    large_hash="b2",
    numerics="cpu/float32/none",
    version="0",
)


def float32(x: float) -> float:
    return struct.unpack("<f", struct.pack("<f", x))[0]


def request(id: str = "r", choice: int = 0, policy: Policy | None = None, **fields) -> Request:
    given = {"prompt_ids": (1, 2, 3), "sampling": Sampling(max_tokens=64, seed=7), "policy_name": "stable"}
    given |= {"received": 1000.0, "params": {"messages": [{"role": "user", "content": "hello"}]}}
    return Request(id=id, choice=choice, policy=policy or Policy(), **(given | fields))


def finished(reason: FinishReason = FinishReason.STOP, counts: Counts | None = None, **times) -> Finished:
    timings = Timings(
        **({"received": 1000.0, "admitted": 1000.5, "first_token": 1001.0, "finished": 1002.0} | times)
    )
    return Finished(reason, counts or Counts(), timings)


def step(request_id: str = "r", seq: int = 0, **fields) -> Step:
    """A written token of the large model, unless fields say otherwise."""
    given = {
        "choice": 0, "idx": seq, "round": seq, "draft_pos": 0, "tick": seq, "token_id": 65 + seq % 26,
        "token_bytes": bytes([65 + seq % 26]), "tier": Tier.LARGE, "action": Action.DEFER,
        "reason": Reason.PROTECTED_PREFIX, "score": None, "threshold": 0.5,
        "signals": Signals(0.5, 0.25, 1.5),
        "run_length": 0, "ema_acceptance": 1.0, "draft_limit": 5, "guard_value": 0.0, "large_used": seq,
        "small_choice": 65, "small_topk": TopK((65, 66), (-0.5, -1.5)),
        "large_topk": TopK((65, 66), (-0.25, -2.0)),
        "p_large": 0.75, "large_choice": 65 + seq % 26, "outcome": Outcome.LARGE, "audit_agrees": True,
        "audit_source": "verify", "pass_id": seq, "batch_rows": 1, "small_kv": seq, "large_kv": seq,
        "latency_us": 1000, "ts": 1000.0 + seq,
    }  # fmt: skip
    return Step(request_id=request_id, seq=seq, **(given | fields))


def passed(pass_id: int = 0, **fields) -> PassRecord:
    given = {"tick": pass_id, "tier": Tier.LARGE, "rows": 1, "tokens": 1, "context_tokens": 3, "ms": 2.0}
    return PassRecord(pass_id=pass_id, **(given | {"host_ms": 0.5, "adapted": False, "ts": 1000.0} | fields))


@dataclass
class Script:
    """One choice decoded by a scripted pair of models over a small vocabulary."""

    policy: Policy
    seed: int = 0
    num_tokens: int = 60
    vocabulary: int = 50
    agreement: float = 0.8
    request_id: str = "r"
    choice: int = 0
    rows: list[Step] = field(default_factory=list)
    output: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.tiers: list[Tier] = []
        self.ema = 1.0
        self.round = 0
        # Periodic output now and then, so that the loop guard has something to do.
        self.cycle = self.random.choice([2, 3, 1000])

    def run(self) -> Script:
        routed = self.policy.mode is Mode.ROUTED
        while len(self.output) < self.num_tokens:
            if self.policy.verified:
                self._verified_round()
            elif routed:
                self._trusted()
            else:
                self._alone()
            self.round += 1
        return self

    def _models(self, idx: int, context: list[int]) -> tuple[int, int, Signals]:
        """(x, y, signals): the small and the large model's tokens at one position."""
        y = idx % self.cycle if self.cycle < 1000 else self.random.randrange(self.vocabulary)
        agree = self.random.random() < self.agreement
        x = y if agree else (y + 1 + self.random.randrange(self.vocabulary - 1)) % self.vocabulary
        gap = self.random.random() if agree else self.random.random() ** 2
        return x, y, Signals(float32((1 + gap) / 2), float32(gap), float32(2 * (1 - gap)))

    def _run(self, tiers: list[Tier]) -> int:
        length = 0
        while length < len(tiers) and tiers[-1 - length] is not Tier.LARGE:
            length += 1
        return length

    def _guard(self, context: list[int], proposal: int) -> float:
        n = self.policy.loop_ngram
        gram = [*context[len(context) - n + 1 :], proposal]
        if len(gram) < n:
            return 0.0
        return float(sum(context[i : i + n] == gram for i in range(len(context) - n + 1)))

    def _score(self, run: int, signals: Signals) -> float:
        p = self.policy
        total = p.bias + p.gap_weight * signals.gap + p.entropy_weight * signals.entropy
        total = total + p.run_weight * (run / p.max_small_run) + p.acceptance_weight * self.ema
        return float32(min(1.0, max(0.0, total)))

    def _row(self, drafts: list[int], limit: int, **fields) -> Step:
        context = self.output + drafts
        row = step(
            self.request_id,
            seq=len(self.rows),
            choice=self.choice,
            idx=len(context),
            round=self.round,
            draft_pos=len(drafts),
            run_length=self._run(self.tiers + [Tier.SMALL] * len(drafts)),
            ema_acceptance=self.ema,
            draft_limit=limit,
            large_used=self.tiers.count(Tier.LARGE),
            threshold=float32(self.policy.threshold),
        )
        return replace(row, **fields)

    def _emit(self, row: Step) -> None:
        row = replace(row, seq=len(self.rows), token_bytes=bytes([row.token_id % 256]))
        self.rows.append(row)
        if row.written:
            self.output.append(row.token_id)
            self.tiers.append(row.tier)

    def _decide(self, drafts: list[int], limit: int) -> tuple[Step, int, int]:
        """The row decided at the position after drafts, with x and y."""
        p, context = self.policy, self.output + drafts
        x, y, signals = self._models(len(context), context)
        row = self._row(
            drafts, limit, signals=signals, small_choice=x, large_choice=y,
            small_topk=TopK((x, y), (-0.5, -1.5)), large_topk=TopK((y, x), (-0.25, -2.0)),
        )  # fmt: skip
        keep, defer = Action.KEEP, Action.DEFER
        if p.mode is Mode.LARGE_ONLY:
            return replace(row, action=defer, reason=Reason.MODE), x, y
        guard = self._guard(context, x)
        if p.mode is Mode.SMALL_ONLY:
            return replace(row, action=keep, reason=Reason.MODE, guard_value=guard), x, y
        if len(context) < p.protect_first:
            return replace(row, action=defer, reason=Reason.PROTECTED_PREFIX), x, y
        if len(drafts) >= limit:
            return replace(row, action=defer, reason=Reason.DRAFT_FULL), x, y
        if row.run_length >= p.max_small_run:
            return replace(row, action=defer, reason=Reason.RUN_LIMIT), x, y
        row = replace(row, guard_value=guard)
        if p.loop_limit and guard >= p.loop_limit:
            return replace(row, action=defer, reason=Reason.LOOP_GUARD), x, y
        score = self._score(row.run_length, signals)
        confident = score >= float32(p.threshold)
        reason = Reason.CONFIDENT if confident else Reason.LOW_CONFIDENCE
        return replace(row, action=keep if confident else defer, reason=reason, score=score), x, y

    def _verified_round(self) -> None:
        limit = self.random.randint(1, self.policy.draft_length)
        drafts: list[tuple[Step, int, int]] = []
        while True:
            tokens = [x for _, x, _ in drafts]
            row, x, y = self._decide(tokens, limit)
            if row.action is Action.DEFER:
                break
            drafts.append((row, x, y))
        accepted = next((i for i, (_, x, y) in enumerate(drafts) if x != y), len(drafts))
        for i, (kept, token, wanted) in enumerate(drafts):
            outcome = (
                Outcome.ACCEPTED if i < accepted else Outcome.REJECTED if i == accepted else Outcome.DISCARDED
            )
            agrees = None if outcome is Outcome.DISCARDED else token == wanted
            self._emit(replace(kept, token_id=token, tier=Tier.SMALL, outcome=outcome, audit_agrees=agrees,
                               audit_source=None if agrees is None else "verify"))  # fmt: skip
        for i in range(min(accepted + 1, len(drafts))):
            self.ema = float32(0.9 * self.ema + (1 - 0.9) * (1.0 if i < accepted else 0.0))
        if accepted == len(drafts):
            full = row.reason is Reason.DRAFT_FULL
            self._emit(replace(row, token_id=y, outcome=Outcome.BONUS if full else Outcome.LARGE))
            return
        if row.reason in (Reason.LOOP_GUARD, Reason.LOW_CONFIDENCE):
            self._emit(replace(row, token_id=x, tier=Tier.SMALL, outcome=Outcome.DISCARDED, audit_agrees=None,
                               large_choice=None, large_topk=None, p_large=None))  # fmt: skip
        rejected, _, wanted = drafts[accepted]
        self._emit(replace(rejected, token_id=wanted, tier=Tier.LARGE, action=None, reason=None, score=None,
                           outcome=Outcome.RECOVERED))  # fmt: skip

    def _trusted(self) -> None:
        row, x, y = self._decide([], self.policy.draft_length)
        if row.action is Action.DEFER:
            self._emit(replace(row, token_id=y, outcome=Outcome.LARGE))
        else:
            self._emit(replace(row, token_id=x, tier=Tier.SMALL, outcome=Outcome.KEPT, audit_agrees=x == y,
                               audit_source="catchup"))  # fmt: skip

    def _alone(self) -> None:
        row, x, y = self._decide([], self.policy.draft_length)
        if row.action is Action.DEFER:
            self._emit(replace(row, token_id=y, outcome=Outcome.LARGE))
        else:
            unseen = {"large_choice": None, "large_topk": None, "p_large": None}
            unseen |= {"audit_agrees": None, "audit_source": None}
            self._emit(replace(row, token_id=x, tier=Tier.SMALL, outcome=Outcome.KEPT, **unseen))

    def trace(self) -> Trace:
        """Its request as it stands at the end."""
        count = self.tiers.count
        counts = Counts(small_tokens=count(Tier.SMALL), large_tokens=count(Tier.LARGE))
        given = request(self.request_id, self.choice, self.policy)
        return Trace(given, SERVED, finished(FinishReason.LENGTH, counts))


def record(recorder, script: Script, rows_per_tick: int = 7) -> None:
    """Hand a finished script to an observer, tick by tick."""
    trace = script.trace()
    recorder.on_admit(Trace(trace.request, trace.served))
    for start in range(0, len(script.rows), rows_per_tick):
        number = start // rows_per_tick
        recorder.on_tick(Tick(number, passed(number), [], script.rows[start : start + rows_per_tick]))
    recorder.on_finish(trace)

"""Closed-loop runs: prompts through an engine under a policy, every step and label kept.

Greedy, lookup in the row's own text only, load never caps drafts: what is measured is the policy, not the
neighbours or the machine's mood.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.core import UNWRITTEN, Accept, FinishReason, Outcome, Sampling, Signals, Step, Tick, Tier
from gateway.engine import Engine
from gateway.policy import Policy, admitted
from gateway.request import Request
from gateway.tuning.prompts import Prompt

COLUMNS = (
    "idx", "token_id", "tier", "action", "reason", "score", "run_length", "ema_acceptance", "fact_value",
    "small_choice", "large_choice", "outcome",
)  # fmt: skip
"""What is kept of each step; beside it both models' signals."""

SIGNALS = ("top1_p", "gap", "entropy", "attn_entropy")
"""Of the small model."""

LARGE_SIGNALS = tuple(f"large_{name}" for name in SIGNALS)
"""Of the large model, where it has seen the position."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt's answer: rows of the tape in seq order, as columns (COLUMNS, SIGNALS, LARGE_SIGNALS, and
    `hidden`, base64 of float16, where the runner keeps it).

    prompt: the prompt's digest. finish: how it ended. large_passes, small_passes: passes with this row.
    """

    prompt: str
    finish: str
    large_passes: int
    small_passes: int
    columns: dict[str, list[Any]]

    @property
    def written(self) -> list[int]:
        """Row numbers of the output tokens, in order."""
        outcomes = self.columns["outcome"]
        return [i for i, outcome in enumerate(outcomes) if Outcome(outcome) not in UNWRITTEN]

    @property
    def tokens(self) -> list[int]:
        """Output token ids."""
        return [self.columns["token_id"][i] for i in self.written]

    def signals(self, i: int) -> Signals | None:
        """What the small model said at row i; None where it said nothing."""
        if self.columns["gap"][i] is None:
            return None
        state = self.columns["hidden"][i] if "hidden" in self.columns else None
        hidden = None if state is None else base64.b64decode(state)
        return Signals(**{name: self.columns[name][i] for name in SIGNALS}, hidden=hidden)

    def count(self, tier: Tier) -> int:
        """Output tokens that a tier wrote."""
        return sum(self.columns["tier"][i] == tier for i in self.written)


@dataclass(frozen=True, slots=True)
class Spent:
    """What a run took: seconds of wall time, and passes and their milliseconds by tier."""

    wall_s: float
    passes: dict[Tier, int]
    ms: dict[Tier, float]


@dataclass(slots=True)
class Runner:
    """Runs prompts through one engine, which nothing else uses. spent: of the last `run`.

    audits: whether the large model is asked about every token it did not verify. keeps_hidden: whether
    answers hold the small model's hidden states.
    """

    engine: Engine
    max_tokens: int
    audits: bool = True
    keeps_hidden: bool = False
    spent: Spent = field(default_factory=lambda: Spent(0.0, {}, {}))

    def run(self, prompts: Sequence[Prompt], policy: Policy) -> Iterator[Answer]:
        """Answers as they are complete, labels of unverified tokens included; in no fixed order.

        Raises ValueError for a prompt that does not fit, RuntimeError when a pass failed.
        """
        engine, began = self.engine, time.perf_counter()
        passes: dict[Tier, int] = {Tier.SMALL: 0, Tier.LARGE: 0}
        ms = dict.fromkeys(passes, 0.0)
        running: dict[str, _Running] = {}
        for prompt in prompts:
            request = self._request(prompt, policy)
            engine.check(request)
            running[prompt.digest] = _Running()
            engine.add(request)
        while not engine.idle:
            tick = engine.tick()
            if tick.passed is not None:
                passes[tick.passed.tier] += 1
                ms[tick.passed.tier] += tick.passed.ms + tick.passed.host_ms
            self._fold(tick, running)
            for settled in tick.settled:
                yield running.pop(settled.request_id).answer(settled.request_id, self.keeps_hidden)
        self.spent = Spent(time.perf_counter() - began, passes, ms)

    def _request(self, prompt: Prompt, policy: Policy) -> Request:
        return Request(
            id=prompt.digest,
            choice=0,
            prompt_ids=prompt.ids(self.engine.tokenizer),
            sampling=Sampling(max_tokens=self.max_tokens, seed=0, temperature=0.0),
            policy=admitted(policy, prompt.detected, self.max_tokens),
            policy_name="",
            received=time.time(),
            num_topk=2,
            keep_hidden=self.keeps_hidden,
            audited=self.audits,
        )

    def _fold(self, tick: Tick, running: dict[str, _Running]) -> None:
        for step in (*tick.steps, *tick.restated):
            running[step.request_id].steps[step.seq] = step
        for delta in tick.deltas:
            if delta.finished is not None:
                if delta.finished.reason is FinishReason.ERROR:
                    raise RuntimeError(f"a pass failed: {delta.finished.error}")
                end = running[delta.request_id]
                end.finish = delta.finished.reason
                end.large_passes = delta.finished.counts.large_passes
                end.small_passes = delta.finished.counts.small_passes


@dataclass(slots=True)
class _Running:
    steps: dict[int, Step] = field(default_factory=dict)
    finish: FinishReason = FinishReason.ABORT
    large_passes: int = 0
    small_passes: int = 0

    def answer(self, prompt: str, hidden: bool) -> Answer:
        steps = [self.steps[seq] for seq in sorted(self.steps)]
        columns = {name: [getattr(step, name) for step in steps] for name in COLUMNS}
        small, large = [step.signals for step in steps], [step.large_signals for step in steps]
        for name, of_large in zip(SIGNALS, LARGE_SIGNALS, strict=True):
            columns[name] = [None if said is None else getattr(said, name) for said in small]
            columns[of_large] = [None if said is None else getattr(said, name) for said in large]
        if hidden:
            columns["hidden"] = [_text(None if said is None else said.hidden) for said in small]
        return Answer(prompt, self.finish, self.large_passes, self.small_passes, columns)


def _text(state: bytes | None) -> str | None:
    return None if state is None else base64.b64encode(state).decode()


def disagreement(answer: Answer, policy: Policy) -> float:
    """Share of the output's tokens that disagree with the large model, in [0, 1].

    A token that the large model did not write and would not have written, or that it never saw. Under
    `exact` no such token is served, so the proposals that it had to throw away are counted instead.
    """
    columns, written = answer.columns, answer.written
    if not written:
        return 0.0
    if policy.verified and policy.accept is Accept.EXACT:
        wrong = sum(
            outcome == Outcome.REJECTED and tier == Tier.SMALL
            for outcome, tier in zip(columns["outcome"], columns["tier"], strict=True)
        )
        return float(min(1.0, wrong / len(written)))
    wrong = sum(
        columns["tier"][i] != Tier.LARGE and columns["token_id"][i] != columns["large_choice"][i]
        for i in written
    )
    return float(wrong / len(written))

"""The router's rules: one position's history and signals in, keep or defer out.

Pure and deterministic: the engine decides with it live, replay recomputes with it, what-if varies it.
Every number it reads is a float32 value, because that is what the tape stores.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from msgspec import Struct

from gateway.core import MIDDLES, Accept, Action, Kind, Mode, Reason, Signals, Tier
from gateway.router import Router

EMA_DECAY = 0.9
"""Weight of the past in the running acceptance; one verified draft moves it by a tenth."""


POSITION_SPAN = 256
"""Output positions over which the position term of the score rises from 0 to 1."""


MAY_RIDE = frozenset({Reason.LOW_CONFIDENCE, Reason.FACT_GUARD, Reason.PROBE})
"""Rules that defer a token which may then ride along with the large model's pass. The others ask for none, or
it is a loop, of which each position is to be told."""


def f32(x: float) -> float:
    """x rounded to the nearest float32, as the tape stores it."""
    return float(struct.unpack("f", struct.pack("f", x))[0])


@dataclass(frozen=True, slots=True)
class Level:
    """What a middle tier does differently; None: as the policy says.

    threshold: score from which it lets a token stand as a draft for the next tier. draft_length: most of
    those.
    """

    threshold: float | None = None
    draft_length: int | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Level:
        """From what `settings` gave; raises ValueError, naming settings that this version does not know."""
        if unknown := sorted(set(settings) - {f.name for f in fields(cls)}):
            raise ValueError(f"settings this version does not know: {unknown}")
        return cls(**settings)


@dataclass(frozen=True, slots=True)
class Policy:
    """How one request is routed; the contract's `routing` keys and the shape of the score.

    score = clip(bias + gap_weight * gap + entropy_weight * entropy + run_weight * run_length / max_small_run
    + acceptance_weight * ema_acceptance + attn_entropy_weight * attn_entropy
    + position_weight * min(idx / 256, 1), 0, 1). By default it is the gap itself.
    router: a learned router, whose P(large agrees) is the score instead.
    fact_guard: proposals that look like part of a fact (numbers, quotations, names) are deferred.
    probe_rate: share of kept decisions deferred at random, so that labels exist where none would be.
    audit_rate: share of requests whose unverified tokens the large model scores after the answer is sent.
    large_below, large_kinds: requests that allow fewer output tokens than large_below, and prompts of these
    kinds, are the large model's alone (`admitted`).
    loop_ngram, loop_limit: a proposal that completes an n-gram (in tokens) the output already holds
    loop_limit times is deferred; loop_limit 0 turns the guard off.
    middle, middle2, middle3: what the tiers between small and large do differently.
    """

    mode: Mode = Mode.ROUTED
    accept: Accept = Accept.EXACT
    threshold: float = 0.5
    accept_threshold: float = 0.3
    alpha: float = 0.3
    draft_length: int = 5
    protect_first: int = 10
    max_small_run: int = 64
    small_repetition_penalty: float = 1.0
    lookup: bool = True
    large_token_budget: int | None = None
    bias: float = 0.0
    gap_weight: float = 1.0
    entropy_weight: float = 0.0
    run_weight: float = 0.0
    acceptance_weight: float = 0.0
    attn_entropy_weight: float = 0.0
    position_weight: float = 0.0
    router: Router | None = None
    fact_guard: bool = False
    loop_ngram: int = 8
    loop_limit: int = 3
    probe_rate: float = 0.0
    audit_rate: float = 0.1
    large_below: int = 0
    large_kinds: tuple[Kind, ...] = ()

    middle: Level | None = None
    middle2: Level | None = None
    middle3: Level | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Policy:
        """From what `settings` gave, as JSON returns it; what is missing takes its default.

        Raises ValueError, naming settings that this version does not know.
        """
        if unknown := sorted(set(settings) - {f.name for f in fields(cls)}):
            raise ValueError(f"settings this version does not know: {unknown}")
        read = dict(settings)
        read["mode"] = Mode(read.get("mode", Mode.ROUTED))
        read["accept"] = Accept(read.get("accept", Accept.EXACT))
        read["large_kinds"] = tuple(map(Kind, read.get("large_kinds", ())))
        if read.get("router") is not None:
            read["router"] = Router.of(read["router"])
        for name in MIDDLES:
            if read.get(name) is not None:
                read[name] = Level.of(read[name])
        return cls(**read)

    def at(self, tier: Tier) -> Policy:
        """The policy as one tier decides by it. A learned router knows the small model's signals alone, so a
        middle tier is judged by the weighted sum of its own."""
        if tier not in MIDDLES:
            return self
        level: Level = getattr(self, tier) or Level()
        return replace(
            self,
            threshold=self.threshold if level.threshold is None else level.threshold,
            draft_length=self.draft_length if level.draft_length is None else level.draft_length,
            router=None,
        )

    @property
    def verified(self) -> bool:
        """Whether kept tokens wait for the large model before the client sees them."""
        return self.mode in (Mode.ROUTED, Mode.SHADOW) and self.accept is not Accept.TRUST

    @property
    def reads_hidden(self) -> bool:
        """Whether the score reads the small model's last hidden state."""
        return self.router is not None and bool(self.router.probe)

    def can_score(self, signals: Signals) -> bool:
        """Whether the signals hold all that the score reads."""
        return self.router is None or self.router.can_read(signals)

    @property
    def hash(self) -> str:
        """12 hex digits naming these settings; equal settings hash alike."""
        text = json.dumps(settings(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def admitted(policy: Policy, kind: Kind, max_tokens: int) -> Policy:
    """The policy that a request of this kind and token limit runs under, where it does not say its mode."""
    alone = max_tokens < policy.large_below or kind in policy.large_kinds
    return replace(policy, mode=Mode.LARGE_ONLY) if alone and policy.mode is Mode.ROUTED else policy


def settings(policy: Policy) -> dict[str, Any]:
    """Every field of a policy as JSON has it; a level that is not set is left out, as before there were
    any."""
    given = asdict(policy)
    return {name: value for name, value in given.items() if name not in MIDDLES or value is not None}


class State(Struct, frozen=True):
    """What the rules know of the past at one output position.

    draft_pos: tokens already waiting in this round. run_length: consecutive tokens before this one not
    written by the large model, waiting ones included. guard_value: how often the output already holds
    the n-gram that the proposal would complete. draft_limit: most tokens of this round; 0 under load, while
    routing does not pay; -1 while the large model cannot be had (degraded). large_used: tokens the large
    model has written.
    probe_u: the uniform draw that decides whether this position is probed. fact_value: 1 where the proposal
    looks like part of a fact, 0 where not, None where that was not asked.
    """

    idx: int
    draft_pos: int
    draft_limit: int
    run_length: int
    guard_value: float
    ema_acceptance: float
    large_used: int
    probe_u: float | None = None
    fact_value: float | None = None


class Decision(Struct, frozen=True):
    """keep or defer, the rule that said so, and the score where one was computed."""

    action: Action
    reason: Reason
    score: float | None = None


def score(policy: Policy, state: State, signals: Signals) -> float:
    """The routing score in [0, 1], a float32 value; terms are added in a fixed order."""
    run_share = state.run_length / policy.max_small_run
    if policy.router is not None:
        return f32(policy.router.agreement(signals, state.idx, run_share, state.ema_acceptance))
    total = policy.bias
    total += policy.gap_weight * signals.gap
    total += policy.entropy_weight * signals.entropy
    total += policy.run_weight * run_share
    total += policy.acceptance_weight * state.ema_acceptance
    total += policy.attn_entropy_weight * (signals.attn_entropy or 0.0)
    total += policy.position_weight * min(1.0, state.idx / POSITION_SPAN)
    return f32(min(1.0, max(0.0, total)))


def _loops(policy: Policy, state: State) -> bool:
    return policy.loop_limit > 0 and state.guard_value >= policy.loop_limit


def _over_budget(policy: Policy, state: State) -> bool:
    return policy.large_token_budget is not None and state.large_used >= policy.large_token_budget


def _degraded(state: State) -> bool:
    return state.draft_limit < 0


def decide_early(policy: Policy, state: State) -> Decision | None:
    """The rules that need no proposal; None means: ask the small model."""
    if policy.mode is Mode.LARGE_ONLY:
        return Decision(Action.DEFER, Reason.MODE)
    if policy.mode is Mode.SMALL_ONLY or _degraded(state):
        return None
    if state.idx < policy.protect_first:
        return Decision(Action.DEFER, Reason.PROTECTED_PREFIX)
    if _over_budget(policy, state):
        return None
    if state.draft_limit == 0:
        return Decision(Action.DEFER, Reason.LOAD)
    if state.draft_pos >= state.draft_limit:
        return Decision(Action.DEFER, Reason.DRAFT_FULL)
    if state.run_length >= policy.max_small_run:
        return Decision(Action.DEFER, Reason.RUN_LIMIT)
    return None


def decide_lookup(policy: Policy, state: State) -> Decision | None:
    """Whether a looked-up token may be drafted here; None means: it may not."""
    if policy.mode is not Mode.ROUTED or not policy.lookup or _over_budget(policy, state) or _degraded(state):
        return None
    if decide_early(policy, state) is not None or _loops(policy, state):
        return None
    return Decision(Action.KEEP, Reason.LOOKUP_HIT)


def decide(policy: Policy, state: State, signals: Signals) -> Decision:
    """All rules in order: mode, degraded, protected prefix, budget, draft and run limits, guards, score."""
    early = decide_early(policy, state)
    if early is not None:
        return early
    if policy.mode is Mode.SMALL_ONLY:
        return Decision(Action.KEEP, Reason.MODE)
    if _degraded(state):
        return Decision(Action.KEEP, Reason.DEGRADED)
    if _over_budget(policy, state):
        return Decision(Action.KEEP, Reason.BUDGET)
    if _loops(policy, state):
        return Decision(Action.DEFER, Reason.LOOP_GUARD)
    value = score(policy, state, signals)
    if policy.fact_guard and state.fact_value:
        return Decision(Action.DEFER, Reason.FACT_GUARD, value)
    if value >= f32(policy.threshold):
        if policy.probe_rate and state.probe_u is not None and state.probe_u < f32(policy.probe_rate):
            return Decision(Action.DEFER, Reason.PROBE, value)
        return Decision(Action.KEEP, Reason.CONFIDENT, value)
    return Decision(Action.DEFER, Reason.LOW_CONFIDENCE, value)


class History:
    """One choice's past, folded step by step; the engine and replay fold the same way.

    Drafts wait in order for the tier above the one they stood at last: those that wait for the large model
    first. `resolve` says how many of these it let stand, `recall` takes the others back for the next tier to
    judge.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.tokens: list[int] = []
        self.num_drafts = 0
        self.large_used = 0
        self._waiting = dict.fromkeys((Tier.SMALL, *MIDDLES), 0)
        self._acceptance = dict.fromkeys(self._waiting, 1.0)
        self._written_run = 0
        self._ngrams: Counter[tuple[int, ...]] = Counter()

    @property
    def num_written(self) -> int:
        """Output tokens that stand, without waiting drafts."""
        return len(self.tokens) - self.num_drafts

    @property
    def run_length(self) -> int:
        """Consecutive last tokens not written by the large model, waiting ones included."""
        return self._written_run + self.num_drafts

    def num_waiting(self, tier: Tier) -> int:
        """Drafts that stood at this tier and wait for the next one."""
        return self._waiting[tier]

    def state(
        self,
        proposal: int | None,
        draft_limit: int,
        probe_u: float | None = None,
        fact_value: float | None = None,
        tier: Tier = Tier.SMALL,
    ) -> State:
        """The state in which a tier decides the next position, given its proposal if known."""
        return State(
            idx=len(self.tokens),
            draft_pos=self._waiting[tier],
            draft_limit=draft_limit,
            run_length=self.run_length,
            guard_value=float(self._ngrams[self._ngram_with(proposal)]) if proposal is not None else 0.0,
            ema_acceptance=self._acceptance[tier],
            large_used=self.large_used,
            probe_u=probe_u,
            fact_value=fact_value,
        )

    def draft(self, token: int, tier: Tier = Tier.SMALL) -> None:
        """A proposal kept by a tier waits for the next one."""
        self._push(token)
        self.num_drafts += 1
        self._waiting[tier] += 1

    def keep(self, token: int) -> None:
        """A kept proposal stands without verification."""
        self._push(token)
        self._written_run += 1

    def recall(self, tier: Tier) -> None:
        """The drafts that stood at this tier are before the next, a middle one, which says one by one what
        becomes of them."""
        self._drop(self._waiting[tier])
        self._waiting[tier] = 0

    def examined(self, tier: Tier, stood: bool) -> None:
        """Of a tier's drafts one more was examined."""
        hit = 1.0 if stood else 0.0
        self._acceptance[tier] = f32(EMA_DECAY * self._acceptance[tier] + (1 - EMA_DECAY) * hit)

    def resolve(self, num_accepted: int, large_token: int | None) -> None:
        """The large model let num_accepted drafts stand, dropped the rest, and wrote large_token.

        large_token is None where the answer ended inside the accepted run.
        """
        if self.num_drafts:
            tier = next(tier for tier in reversed(self._waiting) if self._waiting[tier])
            for i in range(min(num_accepted + 1, self.num_drafts)):
                self.examined(tier, i < num_accepted)
            self._drop(self.num_drafts - num_accepted)
            self._written_run += num_accepted
            self._waiting = dict.fromkeys(self._waiting, 0)
            self.num_drafts = 0
        if large_token is not None:
            self._push(large_token)
            self._written_run = 0
            self.large_used += 1

    def abandon(self) -> None:
        """Waiting drafts are given up unjudged."""
        self._drop(self.num_drafts)
        self._waiting = dict.fromkeys(self._waiting, 0)

    def shadow(self, decision: Decision, proposal: int, written: int) -> None:
        """Fold what routing would have done where the large model wrote `written` (mode `shadow`).

        A kept proposal that the large model did not write would have been rejected; under `trust` it would
        have stood, so the run goes on although the text is the large model's.
        """
        if decision.action is Action.DEFER:
            self.resolve(self.num_drafts, written)
        elif not self.policy.verified:
            self.keep(written)
        elif proposal == written:
            self.draft(written)
        else:
            self.draft(proposal)
            self.resolve(self.num_drafts - 1, written)

    def _ngram_with(self, token: int) -> tuple[int, ...]:
        return (*self.tokens[len(self.tokens) - self.policy.loop_ngram + 1 :], token)

    def _push(self, token: int) -> None:
        if len(self.tokens) + 1 >= self.policy.loop_ngram:
            self._ngrams[self._ngram_with(token)] += 1
        self.tokens.append(token)

    def _drop(self, num_drafts: int) -> None:
        for _ in range(num_drafts):
            token = self.tokens.pop()
            if len(self.tokens) + 1 >= self.policy.loop_ngram:
                self._ngrams[self._ngram_with(token)] -= 1
        self.num_drafts -= num_drafts

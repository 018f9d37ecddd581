"""One choice while it decodes: its tokens, its drafts, how far each model has read, what its steps lack."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import Struct, structs
from torch import Tensor

from gateway.core import (
    MODELS,
    Action,
    AuditStatus,
    Counts,
    Delta,
    Finished,
    MiddleView,
    Mode,
    PromptToken,
    Reason,
    Sampling,
    Signals,
    Step,
    Tier,
    Timings,
    TopK,
)
from gateway.facts import LOOK_BACK, looks_like_fact
from gateway.lookup import NgramIndex
from gateway.policy import Decision, History, Policy, State, decide_early, score
from gateway.request import Request
from gateway.sampling import Ask, Constraint, Reading, uniform
from gateway.text import TextStream, Tokenizer

MODE = Decision(Action.DEFER, Reason.MODE)


class PassStamp(Struct, frozen=True):
    """What a step says of the pass that wrote it."""

    tick: int
    pass_id: int
    rows: int
    latency_us: int
    ts: float


class Proposal(Struct, frozen=True):
    """A token proposed for one output position, and what was decided about it on its way up.

    tier: who proposed it. small_choice, signals, topk: what the small model says there, None while it has not
    spoken. state, decision: of the lowest level; no decision where a middle tier replaced what that was on.
    middle: what the middle tiers say, as far as it got.
    """

    tier: Tier
    token: int
    small_choice: int | None
    signals: Signals | None
    topk: TopK | None
    state: State
    decision: Decision | None
    stamp: PassStamp
    small_kv: int
    large_kv: int
    decision_no: int | None = None
    middle: tuple[MiddleView, ...] = ()


class Passed(Struct, frozen=True):
    """A tier's decision to defer a position without having been asked for a token."""

    tier: Tier
    decision: Decision
    state: State
    decision_no: int | None


@dataclass(slots=True)
class Row:
    """One choice in the engine.

    sequence: prompt, output and waiting drafts. seen[tier]: how many of `sequence` the tier's cache holds.
    levels: the models below the large one, weakest first; policies: what each of them decides by.
    num_prompt: prompt tokens; most_tokens: how many this choice may write at all. spelt: the bytes of each
    token behind the prompt. shaped: whether the request's parameters reshape the logits.
    drafts: kept proposals that wait for verification, those that came furthest up first. deferred: the
    proposal that ended the round, if there was one. passed: decisions taken without a proposal, one a tier.
    num_decisions: decisions numbered so far. open: written steps that still lack something, by seq;
    unsignalled, unlabelled: output position -> seq of those that lack the small model's signals, the large
    model's view. masks: output position -> what the grammar allowed there, while a model may still be asked.
    flying: its verification is under way elsewhere. drafts_ahead: the small model goes on meanwhile. ahead:
    what it says at the positions after the drafts, each read behind its own top token; good as long as the
    text comes out that way. rides: these go along with the large model's pass, which then may write one token
    more. guesses: how many tokens the small model is to say ahead for that, where the large one writes
    whatever it says. greedy_drafts: the small model proposes its top token, since a large model
    elsewhere does not share its noise. degraded: the large model could not be had, the small one writes on.
    load_cap: most drafts that pay now. shadowed: what routing would have done so far (mode `shadow`). A
    finished row stays until its last signals, and labels where it is audited, are in.
    """

    request: Request
    history: History
    tokenizer: Tokenizer
    text: TextStream
    blocks: tuple[int, ...]
    max_len: int
    timings: Timings
    ready_since: float
    sequence: list[int]
    seen: dict[Tier, int]
    tier: Tier = Tier.LARGE
    levels: tuple[Tier, ...] = field(init=False)
    policies: dict[Tier, Policy] = field(init=False)
    num_prompt: int = field(init=False)
    most_tokens: int = field(init=False)
    spelt: list[bytes] = field(init=False)
    shaped: bool = field(init=False)
    drafts: list[Proposal] = field(default_factory=list)
    deferred: Proposal | None = None
    passed: list[Passed] = field(default_factory=list)
    num_decisions: int = 0
    open: dict[int, Step] = field(default_factory=dict)
    unsignalled: dict[int, int] = field(default_factory=dict)
    unlabelled: dict[int, int] = field(default_factory=dict)
    shadowed: History | None = None
    lookup: NgramIndex | None = None
    constraint: Constraint | None = None
    masks: dict[int, Tensor] = field(default_factory=dict)
    load_cap: int | None = None
    counts: Counts = field(default_factory=Counts)
    seq: int = 0
    round: int = 0
    finished: Finished | None = None
    flying: bool = False
    drafts_ahead: bool = False
    rides: bool = False
    guesses: int = 0
    ahead: deque[tuple[Reading, PassStamp]] = field(default_factory=deque)
    greedy_drafts: bool = False
    degraded: bool = False
    prompt_read: list[PromptToken] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.levels = tuple(tier for tier in MODELS if tier in self.seen and tier is not Tier.LARGE)
        self.policies = {tier: self.request.policy.at(tier) for tier in self.levels}
        self.num_prompt = len(self.request.prompt_ids)
        self.most_tokens = min(self.request.sampling.max_tokens, self.max_len - self.num_prompt)
        self.spelt = [self.tokenizer.token_bytes(token) for token in self.sequence[self.num_prompt :]]
        self.shaped = self.request.sampling.shapes_logits
        if len(self.levels) > 1:
            self.counts.middle_tokens = self.counts.middle_passes = 0

    @property
    def noise_choice(self) -> int:
        """The choice number that goes into the noise."""
        given = self.request.noise_choice
        return self.request.choice if given is None else given

    @property
    def num_left(self) -> int:
        """Tokens this choice may still write."""
        return self.most_tokens - self.history.num_written

    def above(self, tier: Tier) -> Tier:
        """The next stronger model."""
        return (*self.levels, Tier.LARGE)[self.levels.index(tier) + 1]

    def below(self, tier: Tier) -> Tier:
        """The next weaker model."""
        return (*self.levels, Tier.LARGE)[(*self.levels, Tier.LARGE).index(tier) - 1]

    def room(self, tier: Tier) -> int:
        """Tokens that the tier above may still take from this one, its own included."""
        if tier is self.levels[-1]:
            return self.num_left
        above = self.above(tier)
        return min(self.num_left, self.draft_limit(above) - self.history.num_waiting(above))

    def draft_limit(self, tier: Tier) -> int:
        """Most drafts of a tier in a round: the next one always gives one token more, so the last is its."""
        policy = self.policies[tier]
        if self.degraded:
            return -1
        limit = policy.draft_length if self.load_cap is None else min(policy.draft_length, self.load_cap)
        looked_up = bool(self.drafts) and self.drafts[-1].tier is Tier.LOOKUP
        if tier is Tier.SMALL and looked_up and not self.follows_lookup:
            return self.history.num_waiting(tier) or limit
        return min(limit, max(1, self.room(tier) - 1)) if policy.verified else limit

    @property
    def follows_lookup(self) -> bool:
        """Whether the small model drafts on behind what was looked up: not under `trust`, where what it
        writes stands at once, nor below a middle tier, which may drop a looked-up token without a word on it.
        """
        return self.request.policy.verified and len(self.levels) == 1

    def number(self) -> int | None:
        """The next decision's number; None where only the small model decides, in the order of the rows."""
        if len(self.levels) == 1 or self.request.policy.mode is not Mode.ROUTED:
            return None
        self.num_decisions += 1
        return self.num_decisions - 1

    def route(self) -> None:
        """Find the tier that runs next, as far as the rules need no proposal for that.

        The small model, unless a tier's drafts are full: then the one above it. A tier that must defer
        whatever the proposal leaves the word to the next, which runs if drafts wait for it or it may decide.
        """
        self._forget_masks()
        self.passed = []
        mode = self.request.policy.mode
        tiers = [(t, self.history.num_waiting(t), self.draft_limit(t)) for t in self.levels]
        full = next((i for i, (_, waiting, limit) in enumerate(tiers) if 0 < waiting >= limit), 0)
        # Below a tier without room a single waiting draft is a full one.
        for tier, waiting, limit in tiers[full:]:
            state = self.history.state(None, limit, tier=tier)
            # In shadow the large model writes everything; what routing would have done is filled in later.
            early = MODE if mode is Mode.SHADOW else decide_early(self.policies[tier], state)
            if early is None:
                self.tier = tier
                return
            self.passed.append(Passed(tier, early, state, self.number()))
            if waiting:
                self.tier = self.above(tier)
                return
            if early.reason is Reason.MODE:
                break
        self.tier = Tier.LARGE

    @property
    def near(self) -> bool:
        """Whether a tier here can take the row forward now."""
        return not self.flying or self.looks_ahead

    def reads(self, tier: Tier) -> bool:
        """Whether the row's next pass is this tier's, and its client waits for that."""
        return self.tier is tier and self.near and self.finished is None

    @property
    def starts(self) -> bool:
        """Whether the first token is still to come."""
        return not self.history.tokens

    @property
    def protects(self) -> bool:
        """Whether the next token is the large model's because it is among the first."""
        return bool(self.passed) and self.passed[0].decision.reason is Reason.PROTECTED_PREFIX

    def _forget_masks(self) -> None:
        """Drop the masks of positions at which no model will be asked again."""
        if not self.masks:
            return
        written = self.history.num_written
        self.masks = {
            p: mask
            for p, mask in self.masks.items()
            if p >= written or p in self.unsignalled or p in self.unlabelled
        }

    def append(self, token: int) -> None:
        """A token was drafted or written: it joins the sequence and moves the grammar along."""
        if self.ahead and self.ahead.popleft()[0].token != token:
            self.forget_ahead()
        self.sequence.append(token)
        self.spelt.append(self.tokenizer.token_bytes(token))
        if self.constraint is not None:
            self.constraint.advance(token)

    def num_unseen(self, tier: Tier) -> int:
        """Tokens of the sequence that the tier's cache lacks."""
        return len(self.to_read(tier)) - self.seen[tier]

    def to_read(self, tier: Tier) -> list[int]:
        """All that the tier is to read: the sequence, and what the small model guessed ahead where it goes on
        from there or where that rides along."""
        guessed = self.riders if tier is Tier.LARGE else len(self.ahead) if tier is Tier.SMALL else 0
        if not guessed:
            return self.sequence
        return [*self.sequence, *(reading.token for reading, _ in self.ahead)]

    @property
    def riders(self) -> int:
        """Guessed tokens that the large model reads behind the sequence."""
        return len(self.ahead) if self.rides and self.finished is None else 0

    @property
    def looks_ahead(self) -> bool:
        """Whether the small model should read on while the row's verification is under way: as far as the
        round after this one can go, unless that would end earlier as it looks now."""
        policy = self.request.policy
        if not self.flying or policy.mode is not Mode.ROUTED or self.finished is not None:
            return False
        if not self.drafts_ahead or self.load_cap == 0:
            return False
        num, limit = len(self.ahead), self.draft_limit(Tier.SMALL)
        if num > limit or len(self.history.tokens) + num >= self.most_tokens:
            return False
        if not num:
            return True
        reading, sampling = self.ahead[-1][0], self.request.sampling
        ends = set() if sampling.ignore_eos else self.tokenizer.eos_ids
        if reading.token in ends or reading.token in sampling.stop_token_ids:
            return False
        # The first is the large model's position anyway.
        state = self.history.state(None, limit)
        return num == 1 or score(policy, state, reading.signals) >= policy.threshold

    def read_again(self) -> None:
        """What the small model says next is asked for anew: its readings ahead are not those wanted."""
        self.ahead.clear()
        self.seen[Tier.SMALL] = min(self.seen[Tier.SMALL], len(self.sequence) - 1)

    def forget_ahead(self) -> None:
        """The text comes out otherwise than guessed: no model has read more than the sequence."""
        self.ahead.clear()
        for tier in self.seen:
            self.seen[tier] = min(self.seen[tier], len(self.sequence))

    def num_together(self, tier: Tier) -> int:
        """Last tokens that must be fed in one pass: drafts are verified at once, with what rides along."""
        riders = self.riders if tier is Tier.LARGE else 0
        return len(self.history.tokens) + riders - self._next_idx(tier) + 1

    def num_wanted(self, tier: Tier, num_tokens: int) -> int:
        """Positions of a feed whose logits are wanted: where a written step lacks something, and the next."""
        first = min(self._lacking(tier), self._next_idx(tier))
        if self._reads_prompt(tier):
            first = 1 - self.num_prompt
        end = self.seen[tier] + num_tokens
        # The logits that decide output position i are those of the token before it.
        return max(0, end - max(self.seen[tier], self.num_prompt - 1 + first))

    def _reads_prompt(self, tier: Tier) -> bool:
        """Whether this pass owes the client the large model's view of prompt tokens."""
        wanted = self.request.prompt_logprobs and tier is Tier.LARGE
        return wanted and self.seen[tier] < self.num_prompt

    def take_prompt(self, views: list[tuple[int, Reading]]) -> list[tuple[int, Reading]]:
        """Keep what was read of the prompt (negative positions); the views of output positions are left."""
        if not views or views[0][0] >= 0:
            return views
        for position, reading in views:
            if position < 0:
                token = self.sequence[self.num_prompt + position]
                self.prompt_read.append(PromptToken(token, reading.p_draft or 0.0, reading.topk))
        return [view for view in views if view[0] >= 0]

    def probe_u(self, position: int) -> float | None:
        """The uniform in [0, 1) that may probe a position; None where the policy does not probe."""
        if not self.request.policy.probe_rate:
            return None
        return uniform(f"probe:{self.request.sampling.seed}:{self.noise_choice}:{position}")

    def fact_value(self, position: int, proposal: int) -> float:
        """1 where a proposal for an output position looks like part of a fact, else 0."""
        before = self.spelt[max(0, position - LOOK_BACK) : position]
        text = b"".join(before).decode("utf-8", "replace")
        token = self.tokenizer.token_bytes(proposal).decode("utf-8", "replace")
        return float(looks_like_fact(text, token))

    def owe(self, step: Step, *, signals: bool, label: bool) -> None:
        """Note what a written step still lacks."""
        if signals:
            self.unsignalled[step.idx] = step.seq
        if label:
            self.unlabelled[step.idx] = step.seq
        if signals or label:
            self.open[step.seq] = step

    def restate(self, seq: int, **learnt: Any) -> Step:
        """The step with what was learnt of it; it is closed once it lacks nothing more."""
        step = structs.replace(self.open.pop(seq), **learnt)
        if seq in (self.unsignalled.get(step.idx), self.unlabelled.get(step.idx)):
            self.open[seq] = step
        return step

    def permits(self, token: int) -> bool:
        """Whether a looked-up token may come next: min_tokens and the grammar allow it."""
        ask = self.ask(Tier.LARGE, len(self.history.tokens))
        return token not in ask.banned and (ask.mask is None or bool(ask.mask[token]))

    def forgo_signals(self) -> None:
        """The small model will not read what it has not read; those steps stay without its signals."""
        for seq in self.unsignalled.values():
            if seq not in self.unlabelled.values():
                self.open.pop(seq, None)
        self.unsignalled.clear()

    @property
    def afterwards(self) -> Tier | None:
        """The tier a finished row still waits for: signals first, then labels if it is audited."""
        if self.unsignalled:
            return Tier.SMALL
        return Tier.LARGE if self.unlabelled and self.request.audited else None

    @property
    def audit(self) -> AuditStatus:
        """How the audit stands if the row is let go now."""
        if not self.request.audited:
            return AuditStatus.NOT_CHOSEN
        return AuditStatus.LOST if self.unlabelled else AuditStatus.COMPLETE

    def _next_idx(self, tier: Tier) -> int:
        """The first output position that waits for the tier's word: of the drafts below it, or the next."""
        history = self.history
        if tier is Tier.LARGE:
            return history.num_written
        below = self.levels[: self.levels.index(tier)]
        ahead = len(self.ahead) if tier is Tier.SMALL else 0
        return len(history.tokens) + ahead - sum(history.num_waiting(t) for t in below)

    def _lacking(self, tier: Tier) -> int:
        """The first output position that still lacks what the tier says there; the next one if none does."""
        nothing = len(self.history.tokens)
        if tier is Tier.LARGE:
            return next(iter(self.unlabelled), nothing)
        if tier is not Tier.SMALL:
            return nothing
        first = self.history.num_written
        # A middle tier's draft, or a looked-up one, that waits further up while the small model goes on.
        drafts = (first + i for i, draft in enumerate(self.drafts) if draft.signals is None)
        return min(next(iter(self.unsignalled), nothing), next(drafts, nothing))

    def ask(self, tier: Tier, position: int) -> Ask:
        """What to read at an output position (committed, drafted or the next); below 0 at a prompt token."""
        sampling = self.request.sampling
        idx = self.num_prompt + position
        if position < 0:
            return Ask(
                sampling=Sampling(max_tokens=1, seed=0, temperature=0.0),
                choice=self.noise_choice,
                position=position,
                prompt=(),
                output=(),
                num_topk=self.request.num_topk,
                draft=self.sequence[idx],
            )
        banned: tuple[int, ...] = ()
        if position < sampling.min_tokens:
            ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else self.tokenizer.eos_ids)
            banned = tuple(sorted(ends))
        small, policy = tier is Tier.SMALL, self.request.policy
        penalty = policy.small_repetition_penalty if small else 1.0
        if small and self.greedy_drafts and not self.degraded:
            sampling = replace(sampling, temperature=0.0)
        shaped = self.shaped or penalty != 1.0
        return Ask(
            sampling=sampling,
            choice=self.noise_choice,
            position=position,
            prompt=self.request.prompt_ids,
            output=self.to_read(tier)[self.num_prompt : idx] if shaped else (),
            num_topk=self.request.num_topk,
            draft=self.sequence[idx] if tier is not Tier.SMALL and idx < len(self.sequence) else None,
            small_penalty=penalty,
            banned=banned,
            mask=self._mask(position),
            hidden=small and (self.request.keep_hidden or policy.reads_hidden),
        )

    def _mask(self, position: int) -> Tensor | None:
        if self.constraint is None or self.finished is not None:
            return self.masks.get(position)
        if position == len(self.history.tokens) and position not in self.masks:
            self.masks[position] = self.constraint.mask()
        return self.masks.get(position)

    def drop_drafts(self, num_accepted: int) -> None:
        """Roll back to the accepted prefix."""
        self.cut(len(self.sequence) - (len(self.drafts) - num_accepted))
        self.drafts.clear()
        self.deferred = None

    def cut(self, end: int) -> None:
        """Shorten the sequence to its first `end` tokens, and with it what each cache counts as seen."""
        if self.constraint is not None:
            self.constraint.rollback(len(self.sequence) - end)
            self.masks = {p: mask for p, mask in self.masks.items() if p <= end - self.num_prompt}
        if end < len(self.sequence):
            self.forget_ahead()
            del self.sequence[end:], self.spelt[end - self.num_prompt :]
        known = end + len(self.ahead)
        for tier, seen in self.seen.items():
            if seen > known:
                self.seen[tier] = known


@dataclass(slots=True)
class Output:
    """What one tick gathers for one row's client."""

    text: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    finished: Finished | None = None

    def delta(self, row: Row) -> Delta:
        """The client's view of this tick."""
        prompt, row.prompt_read = tuple(row.prompt_read), []
        return Delta(
            row.request.id, row.request.choice, "".join(self.text), tuple(self.steps), self.finished, prompt
        )

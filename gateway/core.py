"""The vocabulary of the decode path: what a request, a step, a pass and a tick are.

Plain frozen types; no torch, no I/O. Everything else speaks in these words. What is made anew for every token
is a msgspec Struct: made in a tenth of a frozen dataclass's time, changed (msgspec.structs.replace) in a
fiftieth.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import Struct


class Tier(StrEnum):
    """Who wrote a token. Models in order: small, then up to three middle ones, then large."""

    SMALL = "small"
    MIDDLE = "middle"
    MIDDLE2 = "middle2"
    MIDDLE3 = "middle3"
    LARGE = "large"
    LOOKUP = "lookup"


MIDDLES = (Tier.MIDDLE, Tier.MIDDLE2, Tier.MIDDLE3)
"""The tiers between small and large, weakest first; a gateway has the first none to three of them."""

MODELS = (Tier.SMALL, *MIDDLES, Tier.LARGE)
"""The tiers that are models, weakest first."""


class Mode(StrEnum):
    """Which models may write (contract: routing.mode)."""

    ROUTED = "routed"
    LARGE_ONLY = "large_only"
    SMALL_ONLY = "small_only"
    SHADOW = "shadow"

    @property
    def runs_small(self) -> bool:
        """Whether the small model reads every position, so that each step carries its signals."""
        return self is not Mode.LARGE_ONLY

    @property
    def runs_large(self) -> bool:
        """Whether the large model reads the text while it is written."""
        return self is not Mode.SMALL_ONLY


class Accept(StrEnum):
    """What the large model must say of a drafted token (contract: routing.accept)."""

    EXACT = "exact"
    THRESHOLD = "threshold"
    TOKEN_V3 = "token_v3"
    TYPICAL = "typical"
    TRUST = "trust"


class Action(StrEnum):
    """The router's verdict on one output position."""

    KEEP = "keep"
    DEFER = "defer"


class Kind(StrEnum):
    """What sort of answer a prompt asks for, as far as its words tell (gateway.kinds)."""

    CODE = "code"
    SHORT = "short"
    REASONING = "reasoning"
    OTHER = "other"


class Reason(StrEnum):
    """The rule that decided; a closed set (contract: The tape)."""

    PROTECTED_PREFIX = "protected_prefix"
    CONFIDENT = "confident"
    LOW_CONFIDENCE = "low_confidence"
    DRAFT_FULL = "draft_full"
    RUN_LIMIT = "run_limit"
    LOOP_GUARD = "loop_guard"
    FACT_GUARD = "fact_guard"
    BUDGET = "budget"
    LOOKUP_HIT = "lookup_hit"
    PROBE = "probe"
    LOAD = "load"
    MODE = "mode"
    DEGRADED = "degraded"


class Outcome(StrEnum):
    """What became of a row of the tape. Rows neither rejected nor discarded are the output."""

    KEPT = "kept"
    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    BONUS = "bonus"
    LARGE = "large"
    FORCED = "forced"
    REJECTED = "rejected"
    DISCARDED = "discarded"


class Verdict(StrEnum):
    """What a middle tier made of a position: of the draft there, or of none.

    rejected is on the draft's row, recovered on that of the middle tier's own token instead; own: the tier
    below had deferred; passed: it deferred without being asked.
    """

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    RECOVERED = "recovered"
    BONUS = "bonus"
    OWN = "own"
    PASSED = "passed"


UNWRITTEN = frozenset({Outcome.REJECTED, Outcome.DISCARDED})
"""Outcomes of rows that are not part of the output."""


class FinishReason(StrEnum):
    """Why a choice ended: OpenAI's `stop` and `length`, vLLM's `abort`, and `error`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Signals(Struct, frozen=True):
    """What a model's distribution A says at one position; every number is a float32 value.

    top1_p: probability of its top token. gap: top1_p minus the runner-up's. entropy: nats.
    attn_entropy: nats, mean over heads of the last layer, or None where it is not measured.
    hidden: the last hidden state as float16, little-endian, or None where nobody reads it.
    """

    top1_p: float
    gap: float
    entropy: float
    attn_entropy: float | None = None
    hidden: bytes | None = None


class TopK(Struct, frozen=True):
    """The k most likely tokens of A (softmax at temperature 1), most likely first; logprobs in nats."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class MiddleView(Struct, frozen=True):
    """What one middle tier said and decided at one row of the tape.

    choice: its own token; p: its A of the token that it judged or put. They, signals and topk are None where
    it was not asked (verdict passed). action and what belongs to it are None on a rejected draft's row:
    nothing was decided about that. draft_pos, draft_limit: of the drafts it has let stand and that wait for
    the next tier; ema_acceptance: how often those stood so far. decision_no: as on the step. pass_id: its
    pass, 0 where it was not asked.
    """

    tier: Tier
    verdict: Verdict
    choice: int | None
    p: float | None
    signals: Signals | None
    topk: TopK | None
    action: Action | None
    reason: Reason | None
    score: float | None
    threshold: float | None
    draft_pos: int
    draft_limit: int
    run_length: int
    ema_acceptance: float
    guard_value: float
    probe_u: float | None
    fact_value: float | None
    decision_no: int | None
    pass_id: int


class Step(Struct, frozen=True):
    """One row of the tape's `steps` table; the columns are documented in logs/README.md.

    signals are the small model's, large_signals the large model's.
    A step is handed over as soon as its token is committed. What is learnt later (the small model's
    signals at a bonus position, the large model's view of a trusted token) arrives as a restated step
    with the same (request_id, choice, seq). middle: the middle tiers' views, weakest first; of three and more
    tiers only. decision_no: the decision's number among all of this choice, where middle tiers also decide.
    overruled_by: the tier that rejected this row's token.
    """

    request_id: str
    choice: int
    idx: int
    seq: int
    round: int
    draft_pos: int
    tick: int
    token_id: int
    token_bytes: bytes
    tier: Tier
    action: Action | None
    reason: Reason | None
    score: float | None
    threshold: float | None
    signals: Signals | None
    run_length: int
    ema_acceptance: float
    draft_limit: int
    guard_value: float
    large_used: int
    small_choice: int | None
    small_topk: TopK | None
    large_topk: TopK | None
    p_large: float | None
    large_choice: int | None
    outcome: Outcome
    audit_agrees: bool | None
    audit_source: str | None
    pass_id: int
    batch_rows: int
    small_kv: int
    large_kv: int
    latency_us: int
    ts: float
    probe_u: float | None = None
    propensity: float | None = None
    fact_value: float | None = None
    large_signals: Signals | None = None
    middle: tuple[MiddleView, ...] = ()
    decision_no: int | None = None
    overruled_by: Tier | None = None

    @property
    def written(self) -> bool:
        """Whether this row's token is part of the output."""
        return self.outcome not in UNWRITTEN


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One model pass: a row of the tape's `passes` table."""

    pass_id: int
    tick: int
    tier: Tier
    rows: int
    tokens: int
    context_tokens: int
    ms: float
    host_ms: float
    adapted: bool
    ts: float


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn and when an answer ends. Defaults are the API's (contract: HTTP)."""

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    @property
    def shapes_logits(self) -> bool:
        """Whether A differs from the plain softmax of the logits, ignoring min_tokens."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
        )


@dataclass(slots=True)
class Counts:
    """Running totals of one choice, in the words of the response's `routing` object.

    adapted: load capped its drafts at least once. degraded: true when the large model could not be reached
    and the small one wrote on. middle_tokens, middle_passes: None where there is no middle tier.
    """

    small_tokens: int = 0
    middle_tokens: int | None = None
    large_tokens: int = 0
    lookup_tokens: int = 0
    protected_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    guard_hits: int = 0
    large_passes: int = 0
    middle_passes: int | None = None
    small_passes: int = 0
    adapted: bool = False
    degraded: bool = False

    @property
    def completion_tokens(self) -> int:
        """Output tokens, whoever wrote them."""
        return self.small_tokens + (self.middle_tokens or 0) + self.large_tokens + self.lookup_tokens


@dataclass(slots=True)
class Timings:
    """Unix seconds of the events of one choice's life; None until it happens."""

    received: float
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """How one choice ended. retry_after_s: after an error that may pass, when trying again is worth it."""

    reason: FinishReason
    counts: Counts
    timings: Timings
    stop: str | int | None = None
    error: str | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class PromptToken:
    """What the large model says of a prompt token, given those before: p_large = A(token), its top tokens."""

    token_id: int
    p_large: float
    large_topk: TopK


class Delta(Struct, frozen=True):
    """What one tick adds to one choice, as the client sees it.

    text: newly released text (held back while it may turn into a stop string or is half a character).
    steps: the written steps committed in this tick, in output order.
    prompt: the prompt's tokens from the second on, where they were asked for; with the first delta.
    """

    request_id: str
    choice: int
    text: str
    steps: tuple[Step, ...]
    finished: Finished | None = None
    prompt: tuple[PromptToken, ...] = ()


class AuditStatus(StrEnum):
    """Whether the large model has seen every token that it did not verify while decoding."""

    NOT_CHOSEN = "not_chosen"
    COMPLETE = "complete"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Settled:
    """A choice of which nothing more will come: its client has its answer and its steps are complete."""

    request_id: str
    choice: int
    audit: AuditStatus


@dataclass(slots=True)
class Tick:
    """All that one turn of the engine did."""

    number: int
    passed: PassRecord | None = None
    deltas: list[Delta] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    restated: list[Step] = field(default_factory=list)
    settled: list[Settled] = field(default_factory=list)

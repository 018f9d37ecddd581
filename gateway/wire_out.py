"""The response bodies of the HTTP API."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from gateway.core import Counts


class ErrorBody(Struct, frozen=True, kw_only=True):
    """What went wrong, in OpenAI's words."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(Struct, frozen=True):
    """The one error envelope."""

    error: ErrorBody


class Usage(Struct, frozen=True, kw_only=True):
    """Token counts of a request, all its choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class RoutingReport(Struct, frozen=True, kw_only=True):
    """Who wrote the answer (contract: Routing, per request); ratios over nothing are null.

    The middle tiers' keys are there where such tiers are.
    """

    policy: str
    policy_hash: str
    arm: str
    small_tokens: int
    large_tokens: int
    lookup_tokens: int
    protected_tokens: int
    deferral_rate: float | None
    num_drafts: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    draft_acceptance_rate: float | None
    mean_acceptance_length: float | None
    guard_hits: int
    large_passes: int
    small_passes: int
    adapted: bool
    degraded: bool
    middle_tokens: int | UnsetType = UNSET
    middle_passes: int | UnsetType = UNSET


def routing_report(policy: str, policy_hash: str, arm: str, counts: Counts) -> RoutingReport:
    """The response's `routing` object; mean acceptance length counts the large model's token of a round."""
    drafts, drafted, accepted = counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_draft_tokens
    total = counts.completion_tokens
    return RoutingReport(
        policy=policy,
        policy_hash=policy_hash,
        arm=arm,
        small_tokens=counts.small_tokens,
        large_tokens=counts.large_tokens,
        lookup_tokens=counts.lookup_tokens,
        protected_tokens=counts.protected_tokens,
        deferral_rate=counts.large_tokens / total if total else None,
        num_drafts=drafts,
        num_draft_tokens=drafted,
        num_accepted_draft_tokens=accepted,
        draft_acceptance_rate=accepted / drafted if drafted else None,
        mean_acceptance_length=1 + accepted / drafts if drafts else None,
        guard_hits=counts.guard_hits,
        large_passes=counts.large_passes,
        small_passes=counts.small_passes,
        adapted=bool(counts.adapted),
        degraded=bool(counts.degraded),
        middle_tokens=UNSET if counts.middle_tokens is None else counts.middle_tokens,
        middle_passes=UNSET if counts.middle_passes is None else counts.middle_passes,
    )


class CompletionLogprobs(Struct, frozen=True, kw_only=True):
    """Completions' `logprobs`: one entry a token; text_offset counts characters of the choice's text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(Struct, frozen=True, kw_only=True):
    """One candidate for a prompt token; rank 1 is the likeliest, null where it is outside the list."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One entry a prompt token, by token id; null for the first, which nothing precedes."""


class CompletionChoice(Struct, frozen=True, kw_only=True):
    """One choice of a completion, or of a chunk of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct, frozen=True, kw_only=True):
    """The answer of /v1/completions; a stream sends several."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    routing: RoutingReport | UnsetType = UNSET


class TokenLogprob(Struct, frozen=True, kw_only=True):
    """A token with its logprob in nats and its exact bytes."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TokenLogprob, frozen=True, kw_only=True):
    """A sampled token with the likeliest alternatives."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    """Chat completions' `logprobs`."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CalledFunction(Struct, frozen=True, kw_only=True):
    """The function of a call; arguments is JSON text."""

    name: str
    arguments: str


class MadeToolCall(Struct, frozen=True, kw_only=True):
    """A tool call that the model made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolCallDelta(Struct, frozen=True, kw_only=True):
    """A whole tool call in a stream, the index-th of its choice."""

    index: int
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(Struct, frozen=True, kw_only=True):
    """The whole answer of one choice."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None = None
    tool_calls: list[MadeToolCall] | UnsetType = UNSET


class MessageDelta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one chunk adds to the answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    """One choice of a chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    routing: RoutingReport
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True, kw_only=True):
    """One choice of a chunk."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Struct, frozen=True, kw_only=True):
    """One event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    routing: RoutingReport | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ModelCard(Struct, frozen=True, kw_only=True):
    """One served model; max_model_len in tokens."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tokentape"
    max_model_len: int


class ModelList(Struct, frozen=True, kw_only=True):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(Struct, frozen=True, kw_only=True):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]


class Prompt(Struct, frozen=True, kw_only=True):
    """The answer of /detokenize."""

    prompt: str


class Health(Struct, frozen=True, kw_only=True):
    """The answer of /health and /ready."""

    status: str


class TraceList(Struct, frozen=True, kw_only=True):
    """A page of traces, newest first."""

    data: list[dict[str, Any]]
    next_cursor: str | None


class Columns(Struct, frozen=True, kw_only=True):
    """A table, column by column."""

    columns: dict[str, list[Any]]

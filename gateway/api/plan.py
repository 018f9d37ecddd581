"""From a checked body to engine requests: prompts to token ids, defaults, limits, and the policy."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.core import MIDDLES, Kind, Mode, Sampling
from gateway.kinds import kind_of
from gateway.policy import Policy, admitted
from gateway.request import Request
from gateway.routing import PolicyConflict, Routing, overlay
from gateway.sampling import Constraint
from gateway.text import Tokenizer
from gateway.trace_context import TraceContext
from gateway.wire import BodyError, CompletionRequest, DecodingRequest, fields

COMPLETION_MAX_TOKENS = 16
"""Completions' default max_tokens (contract: HTTP)."""
LEAST_TEMPERATURE = 1e-4


@dataclass(frozen=True, slots=True)
class Limits:
    """max_model_len: prompt plus answer in tokens. max_choices: prompts times n. num_middles: tiers between
    small and large."""

    max_model_len: int
    max_choices: int
    num_middles: int = 0


@dataclass(frozen=True, slots=True)
class Arm:
    """The policy in force for one request, before its own `routing` keys.

    user_hash: names the sticky key to the evidence of the running rollout.
    """

    name: str
    policy_name: str
    policy: Policy
    user_hash: str | None = None


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a body came from: trace id, path, when it arrived in Unix seconds, whose cached prompts it may
    reuse, and the trace it belongs to."""

    id: str
    endpoint: str
    received: float
    scope: str = ""
    context: TraceContext | None = None


def plan_completion(
    body: CompletionRequest,
    origin: Origin,
    arm: Arm,
    policies: Mapping[str, Policy],
    tokenizer: Tokenizer,
    limits: Limits,
) -> tuple[Request, ...]:
    """One Request a choice, choice = prompt_index * n + i; raises BodyError naming the field."""
    if body.suffix is not None:
        raise BodyError("suffix: inserting before a suffix is not supported", "suffix", "unsupported_value")
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        raise BodyError(f"best_of: only best_of = n ({n}) is supported", "best_of", "unsupported_value")
    if body.max_tokens == 0 and not body.echo:
        raise BodyError("max_tokens: 0 only scores a prompt, with echo = true", "max_tokens", "invalid_value")
    if body.max_tokens == 0 and body.min_tokens:
        raise BodyError(f"min_tokens: {body.min_tokens} is more than max_tokens = 0", "min_tokens")
    prompts = _prompts(body.prompt, tokenizer)
    # An engine's row ends by writing: the one token after a scored prompt is not sent.
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
    top = max(body.logprobs or 0, body.prompt_logprobs or 0)
    reads_prompt = body.prompt_logprobs is not None or bool(body.echo and body.logprobs is not None)
    return requests_for(
        body,
        top,
        prompts,
        [kind_of(text) for text in _texts(body.prompt, prompts, tokenizer)],
        max_tokens,
        origin,
        arm,
        policies,
        tokenizer,
        limits,
        reads_prompt=reads_prompt,
    )


def requests_for(
    body: DecodingRequest,
    num_logprobs: int,
    prompts: Sequence[Sequence[int]],
    kinds: Sequence[Kind],
    max_tokens: int,
    origin: Origin,
    arm: Arm,
    policies: Mapping[str, Policy],
    tokenizer: Tokenizer,
    limits: Limits,
    *,
    prompt_field: str = "prompt",
    reads_prompt: bool = False,
    constraint: Callable[[], Constraint] | None = None,
) -> tuple[Request, ...]:
    """n Requests for each prompt, of the kind beside it; raises BodyError for what no engine could serve."""
    n = body.n or 1
    if n * len(prompts) > limits.max_choices:
        field = "n" if n > 1 else "prompt"
        raise BodyError(
            f"{field}: {len(prompts)} prompts times n = {n} is more than {limits.max_choices} choices", field
        )
    if body.stream_options is not None and not body.stream:
        raise BodyError("stream_options needs stream = true", "stream_options", "invalid_value")
    for prompt in prompts:
        _check_length(len(prompt), max_tokens, limits.max_model_len, prompt_field)
    sampling = _sampling(body, max_tokens, tokenizer)
    policy_name, policy = overlaid(body.routing, arm.policy_name, arm.policy, policies)
    check_levels(policy, limits.num_middles)
    # What a client asked for by name is what it gets.
    says_mode = body.routing is not None and body.routing.mode is not None
    if reads_prompt:
        policy = _reading_the_prompt(policy)
        if body.stream and getattr(body, "prompt_logprobs", None) is not None:
            raise BodyError("prompt_logprobs: not in a stream", "prompt_logprobs", "unsupported_value")
    params = fields(body)
    return tuple(
        Request(
            id=origin.id,
            choice=index * n + i,
            prompt_ids=tuple(prompt),
            sampling=sampling,
            policy=policy if says_mode else admitted(policy, kind, max_tokens),
            policy_name=policy_name,
            received=origin.received,
            arm=arm.name,
            endpoint=origin.endpoint,
            model=body.model,
            params=params,
            num_topk=max(5, num_logprobs),
            kind=kind,
            audited=chosen("audit", origin.id, policy.audit_rate),
            constraint=constraint,
            scope=origin.scope,
            prompt_logprobs=reads_prompt,
            user_hash=arm.user_hash,
            context=origin.context,
        )
        for index, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
        for i in range(n)
    )


def _sampling(body: DecodingRequest, max_tokens: int, tokenizer: Tokenizer) -> Sampling:
    bias = tuple(sorted((int(token), value) for token, value in (body.logit_bias or {}).items()))
    for token, _ in bias:
        _check_token(token, tokenizer, "logit_bias")
    for token in body.stop_token_ids or ():
        _check_token(token, tokenizer, "stop_token_ids")
    stop = body.stop if body.stop is not None else []
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise BodyError(f"min_tokens: {min_tokens} is more than max_tokens = {max_tokens}", "min_tokens")
    return Sampling(
        max_tokens=max_tokens,
        seed=body.seed if body.seed is not None else secrets.randbits(63),
        temperature=_temperature(body.temperature),
        top_k=max(0, body.top_k or 0),
        top_p=_or(body.top_p, 1.0),
        min_p=body.min_p or 0.0,
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=bias,
        min_tokens=min_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def overlaid(
    routing: Routing | None, name: str, policy: Policy, policies: Mapping[str, Policy]
) -> tuple[str, Policy]:
    """A named policy with a `routing` object laid over it; raises BodyError naming the key."""
    if routing is None:
        return name, policy
    if routing.policy is not None:
        if routing.policy not in policies:
            known = ", ".join(sorted(policies))
            raise BodyError(
                f"routing.policy: no policy of this name; there are: {known}",
                "routing.policy",
                "invalid_value",
            )
        name, policy = routing.policy, policies[routing.policy]
    try:
        return name, overlay(policy, routing)
    except PolicyConflict as error:
        param = f"routing.{error.key}"
        raise BodyError(f"routing.{error}", param, "invalid_value") from None


def check_levels(policy: Policy, num_middles: int) -> None:
    """Raise BodyError where a policy speaks of a tier that is not served."""
    for tier in MIDDLES[num_middles:]:
        if getattr(policy, tier) is not None:
            raise BodyError(
                f"routing.{tier}: there are {num_middles} tiers between small and large here",
                f"routing.{tier}",
                "invalid_value",
            )


def _reading_the_prompt(policy: Policy) -> Policy:
    """Logprobs of a prompt are the large model's, so it must have read it before anything is sent."""
    if policy.mode is Mode.SMALL_ONLY:
        raise BodyError(
            "routing.mode: with small_only nobody can tell the prompt's logprobs",
            "routing.mode",
            "invalid_value",
        )
    return replace(policy, protect_first=max(1, policy.protect_first))


def chosen(what: str, request_id: str, rate: float) -> bool:
    """Whether a request is among a share of all: by hash, settled before its answer is known."""
    digest = hashlib.sha256(f"{what}:{request_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < rate * 2**64


def _prompts(prompt: str | Sequence[str | int | list[int]], tokenizer: Tokenizer) -> list[list[int]]:
    if isinstance(prompt, str):
        return [_encode(prompt, tokenizer)]
    if all(isinstance(item, int) for item in prompt):
        return [_checked(prompt, tokenizer)]
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise BodyError("prompt: strings, token ids and lists must not be mixed", "prompt", "invalid_value")
    return [
        _encode(item, tokenizer) if isinstance(item, str) else _checked(item, tokenizer)
        for item in prompt
        if not isinstance(item, int)
    ]


def _texts(
    prompt: str | Sequence[str | int | list[int]], encoded: Sequence[Sequence[int]], tokenizer: Tokenizer
) -> list[str]:
    """The prompts as words, where the client sent token ids too."""
    given = [prompt] if isinstance(prompt, str) else prompt
    if all(isinstance(item, str) for item in given):
        return [str(item) for item in given]
    return [tokenizer.decode(list(ids)) for ids in encoded]


def _encode(text: str, tokenizer: Tokenizer) -> list[int]:
    try:
        return tokenizer.encode(text)
    except ValueError as error:
        raise BodyError(f"prompt: {error}", "prompt", "invalid_value") from None


def _checked(ids: Sequence[Any], tokenizer: Tokenizer) -> list[int]:
    for token in ids:
        _check_token(token, tokenizer, "prompt")
    return list(ids)


def _check_token(token: int, tokenizer: Tokenizer, field: str) -> None:
    if token >= tokenizer.vocab_size:
        raise BodyError(
            f"{field}: token id {token} is not in the vocabulary of {tokenizer.vocab_size} tokens",
            field,
            "invalid_value",
        )


def _check_length(num_prompt: int, max_tokens: int, max_model_len: int, field: str) -> None:
    if num_prompt == 0:
        raise BodyError(f"{field}: the prompt holds no token", field, "invalid_value")
    if num_prompt + max_tokens > max_model_len:
        raise BodyError(
            f"{field}: {num_prompt} prompt tokens and up to {max_tokens} output tokens are more than the "
            f"model's {max_model_len}",
            field,
            "context_length_exceeded",
        )


def _temperature(asked: float | None) -> float:
    """So low a temperature is the limit itself: dividing by it would overflow."""
    temperature = _or(asked, 1.0)
    return temperature if temperature >= LEAST_TEMPERATURE else 0.0


def _or(value: float | None, default: float) -> float:
    return default if value is None else value

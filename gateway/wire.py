"""The request bodies of the HTTP API, decoded and range-checked field by field.

Unknown fields, wrong types and values out of range raise a BodyError that names the field; JSON null
means absent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from gateway.routing import Routing

MAX_TOP_LOGPROBS = 20
INT64 = 2**63

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Length = Annotated[int, Meta(ge=1, le=10_000_000)]
Label = Annotated[str, Meta(max_length=512)]
Moment = Annotated[float, Meta(ge=0.0, le=1e11)]
"""Unix seconds; milliseconds are refused."""


class BodyError(ValueError):
    """A body that cannot be served; param is the path of the field at fault."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A JSON object in which no field may be unknown."""


class StreamOptions(Body, frozen=True, kw_only=True):
    """`stream_options`: the usage in one last chunk, or the running usage in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class DecodingRequest(Body, frozen=True, kw_only=True):
    """What completions and chat completions have in common."""

    model: str
    max_tokens: Length | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=10_000_000)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=10_000_000)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    n: Annotated[int, Meta(ge=1, le=1024)] | None = None
    stop: (
        Annotated[str, Meta(min_length=1, max_length=1024)]
        | Annotated[list[Annotated[str, Meta(min_length=1, max_length=1024)]], Meta(max_length=16)]
        | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Annotated[int, Meta(ge=-INT64, le=INT64 - 1)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Meta(pattern="^[0-9]{1,10}$")], Annotated[float, Meta(ge=-100.0, le=100.0)]],
            Meta(max_length=1024),
        ]
        | None
    ) = None
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    user: Label | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    safety_identifier: Label | None = None
    service_tier: Label | None = None
    prompt_cache_key: Label | None = None
    routing: Routing | None = None


class CompletionRequest(DecodingRequest, frozen=True, kw_only=True):
    """POST /v1/completions; with `echo`, max_tokens 0 scores the prompt and answers nothing."""

    max_tokens: Annotated[int, Meta(ge=0, le=10_000_000)] | None = None
    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=1, le=1024)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    return_tokens_as_token_ids: bool | None = None
    echo: bool | None = None


class TokenizeRequest(Body, frozen=True, kw_only=True):
    """POST /tokenize."""

    model: str
    prompt: str
    add_special_tokens: bool | None = None


class DetokenizeRequest(Body, frozen=True, kw_only=True):
    """POST /detokenize."""

    model: str
    tokens: list[TokenId]


class TraceQuery(Body, frozen=True, kw_only=True):
    """GET /v1/traces: a page, and which traces; since and until in Unix seconds."""

    limit: Annotated[int, Meta(ge=1, le=1000)] = 50
    cursor: str | None = None
    arm: str | None = None
    finish_reason: str | None = None
    since: Moment | None = None
    until: Moment | None = None
    q: str | None = None
    min_guard_hits: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    max_acceptance: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    gateway: str | None = None


class StepsQuery(Body, frozen=True, kw_only=True):
    """GET /v1/traces/{id}/steps: output positions from <= idx < to of one choice."""

    choice: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    start: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = msgspec.field(name="from", default=None)
    stop: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = msgspec.field(name="to", default=None)


class NoQuery(Body, frozen=True, kw_only=True):
    """An endpoint without query parameters."""


B = TypeVar("B", bound=Body)

_MESSAGE = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<at>.*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<key>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<key>.*)`$", re.DOTALL)


def decode(raw: bytes, kind: type[B]) -> B:
    """The body as a struct; raises BodyError naming the field at fault."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BodyError(f"The body is not valid JSON: {error}", None, "invalid_json") from None
    except RecursionError:
        raise BodyError("The body is nested too deeply", None, "invalid_json") from None


def decode_query(pairs: Iterable[tuple[str, str]], kind: type[B]) -> B:
    """Query parameters as a struct; raises BodyError naming the one at fault."""
    values: dict[str, str] = {}
    for name, value in pairs:
        if name in values:
            raise BodyError(f"{name}: given twice", name, "invalid_value")
        values[name] = value
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from None


def fields(body: Body) -> dict[str, Any]:
    """The fields that the client set, as JSON values, for the tape."""
    values: dict[str, Any] = msgspec.to_builtins(body)
    return values


def _field_error(message: str) -> BodyError:
    match = _MESSAGE.match(message)
    assert match is not None
    what, at = match["what"], (match["at"] or "").removesuffix("[...]")
    prefix = f"{at}." if at else ""
    if unknown := _UNKNOWN.match(what):
        param = prefix + unknown["key"]
        return BodyError(f"Unknown field: {param}", param, "unknown_parameter")
    if missing := _MISSING.match(what):
        param = prefix + missing["key"]
        return BodyError(f"Missing field: {param}", param, "missing_required_parameter")
    return BodyError(f"{at}: {what}" if at else what, at or None, "invalid_value")

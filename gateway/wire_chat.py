"""The request body of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from gateway.wire import MAX_TOP_LOGPROBS, Body, DecodingRequest, Length


class TextPart(Body, frozen=True, kw_only=True):
    """One part of a message's content; only text is served."""

    type: Literal["text"]
    text: str


class FunctionCall(Body, frozen=True, kw_only=True):
    """The function of a tool call; arguments is JSON text."""

    name: str
    arguments: str


class ToolCall(Body, frozen=True, kw_only=True):
    """A tool call that an assistant message made."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body, frozen=True, kw_only=True):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None


class JsonSchema(Body, frozen=True, kw_only=True):
    """The schema of `response_format`; it always holds, strict or not."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body, frozen=True, kw_only=True):
    """`response_format`: free text, a JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class FunctionTool(Body, frozen=True, kw_only=True):
    """A function that the model may call; parameters is the JSON schema of its arguments."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body, frozen=True, kw_only=True):
    """One of `tools`."""

    type: Literal["function"]
    function: FunctionTool


class ChosenFunction(Body, frozen=True, kw_only=True):
    """The name in a named tool_choice."""

    name: str


class ChosenTool(Body, frozen=True, kw_only=True):
    """A named tool_choice."""

    type: Literal["function"]
    function: ChosenFunction


class ChatRequest(DecodingRequest, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Length | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

"""From a chat to engine requests: the template, tools, and the grammar that holds the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from gateway.api.plan import Arm, Limits, Origin, requests_for
from gateway.api.tools import offered
from gateway.kinds import kind_of
from gateway.policy import Policy
from gateway.request import Request
from gateway.sampling import Constraint
from gateway.text import TEMPLATE_PARAMETERS, Tokenizer
from gateway.wire import BodyError
from gateway.wire_chat import ChatRequest, Message


def plan_chat(
    body: ChatRequest,
    origin: Origin,
    arm: Arm,
    policies: Mapping[str, Policy],
    tokenizer: Tokenizer,
    limits: Limits,
    constraint: Callable[[], Constraint] | None = None,
) -> tuple[Request, ...]:
    """One Request a choice of a chat; without max_tokens the answer may fill the model's context."""
    if body.top_logprobs is not None and not body.logprobs:
        raise BodyError("top_logprobs needs logprobs = true", "top_logprobs", "invalid_value")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise BodyError(
            "max_completion_tokens: differs from max_tokens", "max_completion_tokens", "invalid_value"
        )
    if body.continue_final_message and body.add_generation_prompt:
        raise BodyError(
            "continue_final_message excludes add_generation_prompt", "continue_final_message", "invalid_value"
        )
    prompt = _chat_prompt(body, tokenizer)
    max_tokens = body.max_completion_tokens or body.max_tokens
    if max_tokens is None:
        max_tokens = max(1, limits.max_model_len - len(prompt))
    return requests_for(
        body,
        max(body.top_logprobs or 0, body.prompt_logprobs or 0),
        [prompt],
        [kind_of(_last_question(body))],
        max_tokens,
        origin,
        arm,
        policies,
        tokenizer,
        limits,
        prompt_field="messages",
        reads_prompt=body.prompt_logprobs is not None,
        constraint=constraint,
    )


def _last_question(body: ChatRequest) -> str:
    """The words of the last user message; empty where there is none."""
    said = (_words(message) for message in reversed(body.messages) if message.role == "user")
    return next(said, "")


def _words(message: Message) -> str:
    """The message's text, its parts joined."""
    if isinstance(message.content, str):
        return message.content
    return "".join(part.text for part in message.content or ())


def _chat_prompt(body: ChatRequest, tokenizer: Tokenizer) -> list[int]:
    for name in sorted(TEMPLATE_PARAMETERS & set(body.chat_template_kwargs or {})):
        field = f"chat_template_kwargs.{name}"
        raise BodyError(f"{field}: not a variable that a client may set", field, "invalid_value")
    messages = [_template_message(message, i) for i, message in enumerate(body.messages)]
    tools = offered(body)
    continues = bool(body.continue_final_message)
    generates = not continues if body.add_generation_prompt is None else body.add_generation_prompt

    def rendered(tools: list[dict[str, Any]] | None) -> list[int]:
        return tokenizer.chat(
            messages,
            tools=tools,
            add_generation_prompt=generates,
            continue_final_message=continues,
            template_kwargs=body.chat_template_kwargs,
        )

    try:
        prompt = rendered(tools)
        without = None if tools is None else rendered(None)
    except ValueError as error:
        raise BodyError(f"messages: {error}", "messages", "invalid_value") from None
    if prompt == without:
        raise BodyError("tools: this model's chat template has no place for them", "tools", "invalid_value")
    return prompt


def _template_message(message: Message, index: int) -> dict[str, Any]:
    """The message as chat templates take it: parts joined, `developer` as `system`, arguments as objects."""
    values: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _words(message),
    }
    if message.content is None and not message.tool_calls:
        raise BodyError(
            f"messages[{index}].content: missing", f"messages[{index}].content", "missing_required_parameter"
        )
    if message.name is not None:
        values["name"] = message.name
    if message.tool_call_id is not None:
        values["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        values["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, index),
                },
            }
            for call in message.tool_calls
        ]
    return values


def _arguments(text: str, index: int) -> Any:
    param = f"messages[{index}].tool_calls"
    try:
        return msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise BodyError(f"{param}: arguments are not JSON: {error}", param, "invalid_value") from None

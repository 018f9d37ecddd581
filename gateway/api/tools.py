"""Tools of a chat: what the request asks for, and the calls in what the model wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.grammar import TOOL_CLOSE, TOOL_OPEN, GrammarError, Grammars
from gateway.sampling import Constraint
from gateway.wire import BodyError
from gateway.wire_chat import ChatRequest, ChosenTool

ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call the model made; arguments is JSON text."""

    name: str
    arguments: str


def wants_grammar(body: ChatRequest) -> bool:
    """Whether the answer must follow a grammar (or asks for one that it cannot have)."""
    formatted = body.response_format is not None and body.response_format.type != "text"
    return formatted or body.tool_choice not in (None, "none", "auto")


def constraint_of(body: ChatRequest, grammars: Grammars) -> Callable[[], Constraint] | None:
    """The grammar that the answer must follow, if any; may take a second. Raises BodyError."""
    offered(body)
    if not wants_grammar(body):
        return None
    wanted = body.response_format
    forced = body.tool_choice not in (None, "none", "auto")
    if wanted is not None and wanted.type == "text":
        wanted = None
    if wanted is not None and forced:
        raise BodyError(
            "tool_choice: a forced tool call excludes response_format", "tool_choice", "invalid_value"
        )
    for field in ("min_tokens", "ignore_eos"):
        if getattr(body, field):
            raise BodyError(
                f"{field}: cannot be held to where a grammar says when the answer ends",
                field,
                "invalid_value",
            )
    if wanted is None:
        return _compiled(
            "tools", lambda: grammars.tool_calls(_forced(body), body.parallel_tool_calls is not False)
        )
    if wanted.type == "json_object":
        return grammars.json_object()
    if wanted.json_schema is None:
        param = "response_format.json_schema"
        raise BodyError(f"Missing field: {param}", param, "missing_required_parameter")
    schema = wanted.json_schema.schema
    return _compiled("response_format.json_schema.schema", lambda: grammars.json_schema(schema))


def offered(body: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools as chat templates take them; None where the model is to see none. Raises BodyError."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise BodyError("tool_choice: there are no tools", "tool_choice", "invalid_value")
        return None
    names = [tool.function.name for tool in body.tools]
    if len(set(names)) != len(names):
        raise BodyError("tools: a name is given twice", "tools", "invalid_value")
    if isinstance(choice, ChosenTool) and choice.function.name not in names:
        param = "tool_choice.function.name"
        raise BodyError(f"{param}: no tool is called {choice.function.name!r}", param, "invalid_value")
    if choice == "none":
        return None
    tools: list[dict[str, Any]] = msgspec.to_builtins(body.tools)
    return tools


def _forced(body: ChatRequest) -> dict[str, Mapping[str, Any]]:
    tools = {tool.function.name: tool.function.parameters or ANY_ARGUMENTS for tool in body.tools or ()}
    if isinstance(body.tool_choice, ChosenTool):
        name = body.tool_choice.function.name
        return {name: tools[name]}
    return tools


def _compiled(param: str, compile_: Callable[[], Callable[[], Constraint]]) -> Callable[[], Constraint]:
    try:
        return compile_()
    except (GrammarError, ValueError) as error:
        raise BodyError(f"{param}: {error}", param, "invalid_value") from None


class ToolCallReader:
    """Splits one choice's text into content and calls, as it comes.

    What may be the beginning of a call is held back. A call that is not what was asked for (no JSON, no
    name) stays content, as the model wrote it. single: further calls are left out.
    """

    def __init__(self, single: bool = False) -> None:
        self._single = single
        self._held = ""
        self._num_calls = 0

    def push(self, text: str) -> tuple[str, list[Call]]:
        """Content and calls that are complete now."""
        self._held += text
        content = ""
        calls: list[Call] = []
        while (start := self._held.find(TOOL_OPEN)) >= 0:
            end = self._held.find(TOOL_CLOSE, start)
            if end < 0:
                content += self._before(start)
                return content, calls
            body = self._held[start + len(TOOL_OPEN) : end]
            call = parse_call(body)
            content += self._before(start)
            whole = self._held[: end - start + len(TOOL_CLOSE)]
            self._held = self._held[len(whole) :]
            if call is None:
                content += whole
            elif not (self._single and self._num_calls):
                calls.append(call)
                self._num_calls += 1
        keep = next(n for n in range(len(TOOL_OPEN) - 1, -1, -1) if self._held.endswith(TOOL_OPEN[:n]))
        return content + self._before(len(self._held) - keep), calls

    def flush(self) -> str:
        """What is still held back at the end: an unfinished call is content."""
        rest, self._held = self._held, ""
        return "" if self._num_calls and not rest.strip() else rest

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        return self._num_calls

    def _before(self, end: int) -> str:
        """Release the held text up to end; line breaks between calls are not content."""
        out, self._held = self._held[:end], self._held[end:]
        return "" if self._num_calls and not out.strip() else out


def parse_call(body: str) -> Call | None:
    """The JSON of a Hermes call; None for anything else."""
    try:
        value = msgspec.json.decode(body.encode("utf-8", "replace"))
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return Call(value["name"], text)

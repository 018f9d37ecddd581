"""How one request's deltas become its response: whole, or chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.api.answer import routing, usage
from gateway.core import Delta, Finished, PromptToken, Step
from gateway.request import Request
from gateway.wire import DecodingRequest
from gateway.wire_out import RoutingReport, Usage


class Form(Protocol):
    """The shape of one endpoint's responses."""

    def add(self, delta: Delta) -> None:
        """Take a delta in."""

    def whole(self) -> Any:
        """The response body once every choice has ended."""

    def opening(self) -> Iterator[Any]:
        """Chunks that come before any token."""

    def chunks(self, delta: Delta) -> Iterator[Any]:
        """Chunks for a delta that was just added."""

    def closing(self) -> Iterator[Any]:
        """Chunks that come after the last token."""

    def usage(self) -> Usage:
        """The usage so far."""

    def summary(self) -> dict[str, Any]:
        """What the access log says of the answer."""


@dataclass(slots=True)
class ChoiceSoFar:
    """One choice as it grows."""

    text: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    finished: Finished | None = None
    prompt: tuple[PromptToken, ...] = ()


class Answer:
    """The deltas of a request added up; what both endpoints say of them."""

    def __init__(self, body: DecodingRequest, requests: tuple[Request, ...]) -> None:
        self.requests = requests
        self.n = body.n or 1
        self.choices = [ChoiceSoFar() for _ in requests]
        options = body.stream_options
        self._final_usage = bool(options and options.include_usage)
        self._running_usage = bool(options and options.continuous_usage_stats)

    def add(self, delta: Delta) -> None:
        """Take a delta in."""
        choice = self.choices[delta.choice]
        choice.text.append(delta.text)
        choice.steps.extend(delta.steps)
        choice.finished = delta.finished or choice.finished
        choice.prompt += delta.prompt

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return sum(len(choice.steps) for choice in self.choices)

    def usage(self) -> Usage:
        """The usage so far."""
        return usage(self.requests, self.n, self.num_tokens)

    def chunk_usage(self) -> dict[str, Usage | None]:
        """`usage` of an ordinary chunk: absent, null (a last chunk will have it), or the running one."""
        if self._running_usage:
            return {"usage": self.usage()}
        return {"usage": None} if self._final_usage else {}

    @property
    def wants_final_usage(self) -> bool:
        """Whether a last chunk without choices carries the usage."""
        return self._final_usage

    def routing(self, finished: Iterable[Finished] | None = None) -> RoutingReport:
        """The routing of all choices, or of those given."""
        ended = (choice.finished for choice in self.choices) if finished is None else finished
        return routing(self.requests[0], [end.counts for end in ended if end is not None])

    def summary(self) -> dict[str, Any]:
        """What the access log says of the answer."""
        report = self.routing()
        reasons = [str(choice.finished.reason) if choice.finished else None for choice in self.choices]
        return {
            "prompt_tokens": self.usage().prompt_tokens,
            "completion_tokens": self.num_tokens,
            "large_tokens": report.large_tokens,
            "policy": report.policy,
            "finish_reason": reasons[0] if len(set(reasons)) == 1 else reasons,
        }

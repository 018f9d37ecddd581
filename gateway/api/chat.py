"""The responses of /v1/chat/completions."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from msgspec import UNSET, UnsetType

from gateway.api.answer import LogprobsWriter, prompt_logprobs
from gateway.api.form import Answer
from gateway.api.tools import Call, ToolCallReader
from gateway.core import Delta, Finished, FinishReason
from gateway.request import Request
from gateway.text import Tokenizer
from gateway.wire_chat import ChatRequest
from gateway.wire_out import (
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    MadeToolCall,
    MessageDelta,
    PromptLogprobs,
    ToolCallDelta,
)


class ChatForm(Answer):
    """chat.completion objects, or chat.completion.chunk objects that begin with the role."""

    def __init__(
        self, body: ChatRequest, requests: tuple[Request, ...], tokenizer: Tokenizer, created: int
    ) -> None:
        super().__init__(body, requests)
        self._body = body
        self._created = created
        self._tokenizer = tokenizer
        skip = body.skip_special_tokens is not False
        # A chat that offers tools has its text read for calls; any other answer is left as it is.
        offers = bool(body.tools) and body.tool_choice != "none"
        single = body.parallel_tool_calls is False
        self._readers = [ToolCallReader(single) if offers else None for _ in requests]
        self._logprobs = [LogprobsWriter(tokenizer, body.top_logprobs or 0, skip) for _ in requests]

    def whole(self) -> ChatCompletion:
        """The response body once every choice has ended."""
        choices = [
            ChatChoice(
                index=i,
                message=self._message(i, "".join(choice.text)),
                logprobs=self._logprobs[i].chat(choice.steps) if self._body.logprobs else None,
                finish_reason=self._reason(i, choice.finished),
                stop_reason=choice.finished.stop if choice.finished else None,
                token_ids=[step.token_id for step in choice.steps] if self._body.return_token_ids else UNSET,
            )
            for i, choice in enumerate(self.choices)
        ]
        return ChatCompletion(
            id=self.requests[0].id,
            created=self._created,
            model=self._body.model,
            choices=choices,
            usage=self.usage(),
            routing=self.routing(),
            prompt_token_ids=list(self.requests[0].prompt_ids) if self._body.return_token_ids else UNSET,
            prompt_logprobs=self._of_prompt(),
        )

    def _of_prompt(self) -> PromptLogprobs | UnsetType:
        wanted = self._body.prompt_logprobs
        if wanted is None:
            return UNSET
        return prompt_logprobs(
            self.requests[0].prompt_ids[0], self.choices[0].prompt, wanted, self._tokenizer
        )

    def opening(self) -> Iterator[ChatCompletionChunk]:
        """One chunk a choice that tells the role."""
        prompt = list(self.requests[0].prompt_ids) if self._body.return_token_ids else UNSET
        for i in range(len(self.choices)):
            delta = MessageDelta(role="assistant", content="")
            yield self._chunk(
                [ChatChunkChoice(index=i, delta=delta)], **self.chunk_usage(), prompt_token_ids=prompt
            )

    def chunks(self, delta: Delta) -> Iterator[ChatCompletionChunk]:
        """At most one chunk; none for a delta that has nothing to show yet."""
        shows_tokens = self._body.logprobs or self._body.return_token_ids
        said = self._said(delta)
        if not (said or delta.finished or (shows_tokens and delta.steps)):
            return
        choice = ChatChunkChoice(
            index=delta.choice,
            delta=said or MessageDelta(),
            logprobs=self._logprobs[delta.choice].chat(delta.steps) if self._body.logprobs else None,
            finish_reason=self._reason(delta.choice, delta.finished),
            stop_reason=delta.finished.stop if delta.finished else None,
            token_ids=[step.token_id for step in delta.steps] if self._body.return_token_ids else UNSET,
        )
        more = {"routing": self.routing([delta.finished])} if delta.finished is not None else {}
        yield self._chunk([choice], **self.chunk_usage(), **more)

    def closing(self) -> Iterator[ChatCompletionChunk]:
        """The usage, if asked for."""
        if self.wants_final_usage:
            yield self._chunk([], usage=self.usage())

    def _chunk(self, choices: list[ChatChunkChoice], **more: object) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.requests[0].id,
            created=self._created,
            model=self._body.model,
            choices=choices,
            **more,  # type: ignore[arg-type]
        )

    def _message(self, index: int, text: str) -> AssistantMessage:
        reader = self._readers[index]
        if reader is None:
            return AssistantMessage(content=text)
        content, calls = reader.push(text)
        content += reader.flush()
        if not calls:
            return AssistantMessage(content=content)
        made = [MadeToolCall(id=_call_id(), function=_function(call)) for call in calls]
        return AssistantMessage(content=content or None, tool_calls=made)

    def _said(self, delta: Delta) -> MessageDelta | None:
        """What a delta adds to the message; None for nothing."""
        reader = self._readers[delta.choice]
        if reader is None:
            return MessageDelta(content=delta.text) if delta.text else None
        before = reader.num_calls
        content, calls = reader.push(delta.text)
        if delta.finished is not None:
            content += reader.flush()
        if not (content or calls):
            return None
        made = [
            ToolCallDelta(index=before + i, id=_call_id(), function=_function(call))
            for i, call in enumerate(calls)
        ]
        return MessageDelta(content=content or UNSET, tool_calls=made or UNSET)

    def _reason(self, index: int, finished: Finished | None) -> str | None:
        if finished is None:
            return None
        reader = self._readers[index]
        called = reader is not None and reader.num_calls and finished.reason is FinishReason.STOP
        return "tool_calls" if called else str(finished.reason)


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _function(call: Call) -> CalledFunction:
    return CalledFunction(name=call.name, arguments=call.arguments)

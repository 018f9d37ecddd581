"""The responses of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET

from gateway.api.answer import LogprobsWriter
from gateway.api.form import Answer
from gateway.core import Delta, Finished
from gateway.request import Request
from gateway.text import Tokenizer
from gateway.wire import ChatRequest
from gateway.wire_out import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    MessageDelta,
)


class ChatForm(Answer):
    """chat.completion objects, or chat.completion.chunk objects that begin with the role."""

    def __init__(
        self, body: ChatRequest, requests: tuple[Request, ...], tokenizer: Tokenizer, created: int
    ) -> None:
        super().__init__(body, requests)
        self._body = body
        self._created = created
        skip = body.skip_special_tokens is not False
        self._logprobs = [LogprobsWriter(tokenizer, body.top_logprobs or 0, skip) for _ in requests]

    def whole(self) -> ChatCompletion:
        """The response body once every choice has ended."""
        choices = [
            ChatChoice(
                index=i,
                message=AssistantMessage(content="".join(choice.text)),
                logprobs=self._logprobs[i].chat(choice.steps) if self._body.logprobs else None,
                finish_reason=_reason(choice.finished),
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
        if not (delta.text or delta.finished or (shows_tokens and delta.steps)):
            return
        choice = ChatChunkChoice(
            index=delta.choice,
            delta=MessageDelta(content=delta.text) if delta.text else MessageDelta(),
            logprobs=self._logprobs[delta.choice].chat(delta.steps) if self._body.logprobs else None,
            finish_reason=_reason(delta.finished),
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


def _reason(finished: Finished | None) -> str | None:
    return str(finished.reason) if finished is not None else None

"""The responses of /v1/completions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from msgspec import UNSET, UnsetType, structs

from gateway.api.answer import LogprobsWriter, prompt_logprobs
from gateway.api.form import Answer
from gateway.core import Delta, Finished, FinishReason, Step
from gateway.request import Request
from gateway.text import Tokenizer
from gateway.wire import CompletionRequest
from gateway.wire_out import Completion, CompletionChoice, CompletionLogprobs, PromptLogprobs


class CompletionForm(Answer):
    """text_completion objects; with `echo` the prompt's text comes first."""

    def __init__(
        self, body: CompletionRequest, requests: tuple[Request, ...], tokenizer: Tokenizer, created: int
    ) -> None:
        super().__init__(body, requests)
        self._body = body
        self._tokenizer = tokenizer
        self._created = created
        skip = body.skip_special_tokens is not False
        self._echoed = [
            tokenizer.decode(request.prompt_ids, skip_special_tokens=skip) if body.echo else ""
            for request in requests
        ]
        as_ids = body.return_tokens_as_token_ids is True
        self._logprobs = [LogprobsWriter(tokenizer, body.logprobs or 0, skip, as_ids) for _ in requests]
        self._opened: set[int] = set()

    def add(self, delta: Delta) -> None:
        """Take a delta in."""
        super().add(self._shown(delta))

    def whole(self) -> Completion:
        """The response body once every choice has ended."""
        choices = [
            self._choice(i, self._echoed[i] + "".join(choice.text), choice.steps, choice.finished)
            for i, choice in enumerate(self.choices)
        ]
        return self._completion(choices, usage=self.usage(), routing=self.routing())

    def opening(self) -> Iterator[Completion]:
        """Nothing: completions start with the first text."""
        return iter(())

    def chunks(self, delta: Delta) -> Iterator[Completion]:
        """At most one chunk; none for a delta that has nothing to show yet."""
        delta = self._shown(delta)
        text = delta.text
        if delta.choice not in self._opened:
            text = self._echoed[delta.choice] + text
        shows_tokens = self._body.logprobs is not None or self._body.return_token_ids
        if not (text or delta.finished or (shows_tokens and delta.steps)):
            return
        choice = self._choice(delta.choice, text, delta.steps, delta.finished)
        self._opened.add(delta.choice)
        more = {"routing": self.routing([delta.finished])} if delta.finished is not None else {}
        yield self._completion([choice], **self.chunk_usage(), **more)

    def closing(self) -> Iterator[Completion]:
        """The usage, if asked for."""
        if self.wants_final_usage:
            yield self._completion([], usage=self.usage())

    def _shown(self, delta: Delta) -> Delta:
        """The delta; where only the prompt is scored, without the token that the engine wrote after it."""
        if self._body.max_tokens != 0:
            return delta
        ended = delta.finished
        if ended is not None and ended.reason is FinishReason.STOP:
            ended = replace(ended, reason=FinishReason.LENGTH, stop=None)
        return structs.replace(delta, text="", steps=(), finished=ended)

    def _choice(
        self, index: int, text: str, steps: tuple[Step, ...] | list[Step], finished: Finished | None
    ) -> CompletionChoice:
        wants_ids, first = self._body.return_token_ids, index not in self._opened
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=None if self._body.logprobs is None else self._told(index, steps, first),
            finish_reason=str(finished.reason) if finished is not None else None,
            stop_reason=finished.stop if finished is not None else None,
            token_ids=[step.token_id for step in steps] if wants_ids else UNSET,
            prompt_token_ids=list(self.requests[index].prompt_ids) if wants_ids and first else UNSET,
            prompt_logprobs=self._of_prompt(index),
        )

    def _told(self, index: int, steps: Iterable[Step], first: bool) -> CompletionLogprobs:
        """Logprobs of the steps; the first time those of an echoed prompt before them."""
        writer = self._logprobs[index]
        if not (self._body.echo and first):
            return writer.completion(steps)
        return writer.completion(steps, self.requests[index].prompt_ids[0], self.choices[index].prompt)

    def _of_prompt(self, index: int) -> PromptLogprobs | UnsetType:
        wanted = self._body.prompt_logprobs
        if wanted is None:
            return UNSET
        first, prompt = self.requests[index].prompt_ids[0], self.choices[index].prompt
        return prompt_logprobs(first, prompt, wanted, self._tokenizer)

    def _completion(self, choices: list[CompletionChoice], **more: object) -> Completion:
        return Completion(
            id=self.requests[0].id,
            created=self._created,
            model=self._body.model,
            choices=choices,
            **more,  # type: ignore[arg-type]
        )

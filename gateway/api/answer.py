"""From the engine's deltas to the words of the response: texts, logprobs, usage and routing."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Sequence
from dataclasses import fields

from gateway.core import Counts, PromptToken, Step, TopK
from gateway.request import Request
from gateway.text import Tokenizer
from gateway.wire_out import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    RoutingReport,
    TokenLogprob,
    Usage,
    routing_report,
)

NEVER = -9999.0
"""OpenAI's logprob of a token that is not among the likeliest."""


def usage(requests: Sequence[Request], n: int, completion_tokens: int) -> Usage:
    """Each prompt counts once, however many choices it has."""
    prompt_tokens = sum(len(request.prompt_ids) for request in requests[::n])
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )


def routing(request: Request, counts: Iterable[Counts]) -> RoutingReport:
    """The counts of one or several choices of a request, added up."""
    total = Counts()
    for one in counts:
        for field in fields(Counts):
            if (count := getattr(one, field.name)) is not None:
                setattr(total, field.name, (getattr(total, field.name) or 0) + count)
    return routing_report(request.policy_name, request.policy.hash, request.arm, total)


class LogprobsWriter:
    """One choice's logprobs, token by token, from the steps that wrote it.

    Logprobs are those of A at temperature 1: of the strongest model that has seen the token. Offsets count
    characters of the text before the token's first byte. as_ids: tokens are named
    `token_id:65`, which tells those apart that share a text.
    """

    def __init__(
        self, tokenizer: Tokenizer, num_top: int, skip_special_tokens: bool, as_ids: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._num_top = num_top
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def completion(
        self, steps: Iterable[Step], first: int | None = None, prompt: Iterable[PromptToken] = ()
    ) -> CompletionLogprobs:
        """Completions' form; an echoed prompt comes first, its first token without a logprob."""
        out = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        if first is not None:
            self._append(out, first, None, None)
        for token in prompt:
            logprob, top = prompt_logprob(token, self._num_top)
            self._append(out, token.token_id, logprob, top)
        for step in steps:
            logprob, top = step_logprobs(step, self._num_top)
            self._append(out, step.token_id, logprob, top)
        return out

    def _append(
        self, out: CompletionLogprobs, token: int, logprob: float | None, top: list[tuple[int, float]] | None
    ) -> None:
        out.tokens.append(self._name(token))
        out.token_logprobs.append(logprob)
        out.top_logprobs.append(None if top is None else {self._name(other): value for other, value in top})
        out.text_offset.append(self._offset)
        if token not in self._skipped:
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token)))

    def chat(self, steps: Iterable[Step]) -> ChatLogprobs:
        """Chat completions' form."""
        content = []
        for step in steps:
            logprob, top = step_logprobs(step, self._num_top)
            content.append(
                ChatTokenLogprob(
                    token=self._name(step.token_id),
                    logprob=logprob,
                    bytes=list(self._tokenizer.token_bytes(step.token_id)),
                    top_logprobs=[
                        TokenLogprob(
                            token=self._name(token),
                            logprob=value,
                            bytes=list(self._tokenizer.token_bytes(token)),
                        )
                        for token, value in top
                    ],
                )
            )
        return ChatLogprobs(content=content)

    def _name(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        return token_name(self._tokenizer.token_bytes(token_id))


def token_name(raw: bytes) -> str:
    """A token's text; OpenAI's `bytes:\\xe4` form for one that is not whole UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def step_logprobs(step: Step, num_top: int) -> tuple[float, list[tuple[int, float]]]:
    """The logprob of the step's token and the num_top likeliest (id, logprob), in nats."""
    if step.large_topk is None and step.middle and step.middle[-1].topk is not None:
        return _logprobs(step.token_id, step.middle[-1].topk, step.middle[-1].p, num_top)
    return _logprobs(step.token_id, step.large_topk or step.small_topk, step.p_large, num_top)


def prompt_logprob(token: PromptToken, num_top: int) -> tuple[float, list[tuple[int, float]]]:
    """The same for a prompt token."""
    return _logprobs(token.token_id, token.large_topk, token.p_large, num_top)


def prompt_logprobs(
    first: int, prompt: Iterable[PromptToken], num_top: int, tokenizer: Tokenizer
) -> PromptLogprobs:
    """vLLM's `prompt_logprobs`: for each token the likeliest and itself, by id; null for the first."""
    entries: PromptLogprobs = [None]
    for token in prompt:
        logprob, top = prompt_logprob(token, num_top)
        ranked: dict[int, tuple[float, int | None]] = {
            other: (value, rank) for rank, (other, value) in enumerate(top, 1)
        }
        if token.token_id not in ranked:
            ids = token.large_topk.ids
            rank = ids.index(token.token_id) + 1 if token.token_id in ids else None
            ranked[token.token_id] = (logprob, rank)
        entries.append(
            {
                str(other): PromptLogprob(
                    logprob=value, rank=rank, decoded_token=token_name(tokenizer.token_bytes(other))
                )
                for other, (value, rank) in ranked.items()
            }
        )
    return entries


def _logprobs(
    token: int, topk: TopK | None, p: float | None, num_top: int
) -> tuple[float, list[tuple[int, float]]]:
    pairs = list(zip(topk.ids, topk.logprobs, strict=True)) if topk is not None else []
    logprob = dict(pairs).get(token)
    if logprob is None:
        logprob = math.log(p) if p else NEVER
    return max(logprob, NEVER), [(other, max(value, NEVER)) for other, value in pairs[:num_top]]

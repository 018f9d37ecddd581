"""What a request is called in OpenTelemetry: one table, of the GenAI semantic conventions (v1.41).

A value of None is left out. Prompts and answers are not sent: they are on the tape, under the trace id. Names
that the conventions do not have begin with `tokentape.`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gateway.core import Counts, Finished, PassRecord
from gateway.request import Request

Known = str | int | float | bool | Sequence[str]
Value = Known | None

OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
"""`gen_ai.operation.name` by endpoint; forks keep that of what they were forked from."""
PROVIDER = "tokentape"


@dataclass(frozen=True, slots=True)
class Asked:
    """A client's request as it reaches the engine: its choices. The first stands for what they share."""

    choices: tuple[Request, ...]

    @property
    def first(self) -> Request:
        """Choice 0."""
        return self.choices[0]


@dataclass(frozen=True, slots=True)
class Answered:
    """Its end: how each choice ended, as far as it was seen to, and the request's own end in Unix seconds."""

    asked: Asked
    ended: tuple[Finished, ...]
    at: float

    def total(self, of: Callable[[Counts], int | None]) -> int:
        """A count over all choices; one that a choice does not have is 0."""
        return sum(of(finished.counts) or 0 for finished in self.ended)

    @property
    def error(self) -> str | None:
        """`error.type`: what went wrong, as a word of a closed set."""
        if any(finished.error is not None for finished in self.ended):
            return "engine_error"
        return None if len(self.ended) == len(self.asked.choices) else "cancelled"

    @property
    def first_token_s(self) -> float | None:
        """From receipt to the first token of any choice, seconds."""
        times = [f.timings.first_token for f in self.ended if f.timings.first_token is not None]
        return max(0.0, min(times) - self.asked.first.received) if times else None

    @property
    def per_token_s(self) -> float | None:
        """Mean time between the tokens of a choice, seconds; None below two tokens."""
        spans = [
            (f.timings.finished - f.timings.first_token, f.counts.completion_tokens - 1)
            for f in self.ended
            if f.timings.finished is not None and f.timings.first_token is not None
        ]
        tokens = sum(n for _, n in spans if n > 0)
        return sum(s for s, n in spans if n > 0) / tokens if tokens else None


AT_START: Mapping[str, Callable[[Asked], Value]] = {
    "gen_ai.operation.name": lambda a: OPERATIONS.get(a.first.endpoint, "text_completion"),
    "gen_ai.provider.name": lambda a: PROVIDER,
    "gen_ai.request.model": lambda a: a.first.model or None,
    "gen_ai.request.choice.count": lambda a: len(a.choices) if len(a.choices) > 1 else None,
    "gen_ai.request.max_tokens": lambda a: a.first.sampling.max_tokens,
    "gen_ai.request.temperature": lambda a: a.first.sampling.temperature,
    "gen_ai.request.top_p": lambda a: a.first.sampling.top_p,
    "gen_ai.request.top_k": lambda a: a.first.sampling.top_k or None,
    # Signed 64 bits are all that OTLP has.
    "gen_ai.request.seed": lambda a: a.first.sampling.seed if a.first.sampling.seed < 2**63 else None,
    "gen_ai.request.frequency_penalty": lambda a: a.first.sampling.frequency_penalty or None,
    "gen_ai.request.presence_penalty": lambda a: a.first.sampling.presence_penalty or None,
    "gen_ai.request.stream": lambda a: bool(a.first.params.get("stream")) or None,
    "gen_ai.response.id": lambda a: a.first.id,
    "tokentape.arm": lambda a: a.first.arm,
    "tokentape.policy.name": lambda a: a.first.policy_name,
    "tokentape.policy.hash": lambda a: a.first.policy.hash,
    "tokentape.parent": lambda a: a.first.parent,
}
"""Span attributes known when a request is handed to the engine."""

WRITTEN_BY: Mapping[str, Callable[[Counts], int | None]] = {
    "small": lambda counts: counts.small_tokens,
    "middle": lambda counts: counts.middle_tokens,
    "large": lambda counts: counts.large_tokens,
    "lookup": lambda counts: counts.lookup_tokens,
}
"""Output tokens by who wrote them; every middle tier counts as `middle`."""

AT_END: Mapping[str, Callable[[Answered], Value]] = {
    "gen_ai.response.model": lambda a: a.asked.first.model or None,
    "gen_ai.response.finish_reasons": lambda a: [f.reason.value for f in a.ended],
    "gen_ai.response.time_to_first_chunk": lambda a: a.first_token_s,
    "gen_ai.usage.input_tokens": lambda a: len(a.asked.first.prompt_ids),
    "gen_ai.usage.output_tokens": lambda a: a.total(lambda c: c.completion_tokens),
    "error.type": lambda a: a.error,
    "tokentape.small_tokens": lambda a: a.total(WRITTEN_BY["small"]),
    "tokentape.middle_tokens": lambda a: a.total(WRITTEN_BY["middle"]),
    "tokentape.large_tokens": lambda a: a.total(WRITTEN_BY["large"]),
    "tokentape.lookup_tokens": lambda a: a.total(WRITTEN_BY["lookup"]),
    "tokentape.draft_tokens": lambda a: a.total(lambda c: c.num_draft_tokens),
    "tokentape.accepted_draft_tokens": lambda a: a.total(lambda c: c.num_accepted_draft_tokens),
    "tokentape.guard_hits": lambda a: a.total(lambda c: c.guard_hits),
    "tokentape.degraded": lambda a: any(f.counts.degraded for f in a.ended),
}
"""Span attributes known at its end."""

PASS_EVENT = "tokentape.pass"
AT_PASS: Mapping[str, Callable[[PassRecord], Value]] = {
    "tokentape.pass.id": lambda p: p.pass_id,
    "tokentape.pass.tier": lambda p: str(p.tier),
    "tokentape.pass.rows": lambda p: p.rows,
    "tokentape.pass.tokens": lambda p: p.tokens,
    "tokentape.pass.ms": lambda p: p.ms,
    "tokentape.pass.adapted": lambda p: p.adapted,
}
"""Attributes of the event that a model pass is on the span of every request whose tokens it settled."""

METRICS: Mapping[str, Callable[[Answered], float | None]] = {
    "gen_ai.server.request.duration": lambda a: max(0.0, a.at - a.asked.first.received),
    "gen_ai.server.time_to_first_token": lambda a: a.first_token_s,
    "gen_ai.server.time_per_output_token": lambda a: a.per_token_s,
}
"""Histograms in seconds, one value a request; a None is not recorded."""

TOKENS = "tokentape.output_tokens"
"""A counter of output tokens with the attribute `tokentape.tier`."""
ON_METRICS = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "error.type")
"""The attributes of a metric; closed sets."""

BUCKETS = {
    "gen_ai.server.request.duration": (
        0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92
    ),
    "gen_ai.server.time_to_first_token": (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0
    ),
    "gen_ai.server.time_per_output_token": (
        0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5
    ),
}  # fmt: skip
"""Bucket boundaries that the conventions ask for, seconds."""


T = TypeVar("T")


def attributes(table: Mapping[str, Callable[[T], Value]], of: T) -> dict[str, Known]:
    """What a table says of something, without what it leaves out."""
    return {name: value for name, read in table.items() if (value := read(of)) is not None}

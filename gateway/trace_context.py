"""W3C Trace Context (Level 1): read from a client's headers, carried with its request, sent on to engines."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
MOST_STATE_CHARS = 512
"""A longer tracestate is dropped, as the specification allows."""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Where a call stands in a trace: 32 and 16 hex digits, whether it is recorded, the vendors' state."""

    trace_id: str
    span_id: str
    sampled: bool
    state: str = ""


def read_context(traceparent: str | None, tracestate: str | None = None) -> TraceContext | None:
    """The context of a client's headers; None without them, and where they are invalid."""
    match = _TRACEPARENT.fullmatch((traceparent or "").strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    state = (tracestate or "").strip()
    usable = len(state) <= MOST_STATE_CHARS and state.isascii() and state.isprintable()
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & 1), state if usable else "")


def context_headers(context: TraceContext | None) -> dict[str, str]:
    """What a call made for a request carries, such as one to the large model's engine; none without one."""
    if context is None:
        return {}
    sent = {"traceparent": f"00-{context.trace_id}-{context.span_id}-{int(context.sampled):02x}"}
    return {**sent, "tracestate": context.state} if context.state else sent

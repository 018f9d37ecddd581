"""Domain types to tape rows: what is written down of a request, a step and a pass, at each capture level."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any

import pyarrow as pa
from msgspec import structs

from gateway.core import AuditStatus, MiddleView, PassRecord, Step, Tier
from gateway.policy import settings
from gateway.request import Trace
from logs.schema import MIDDLE, arrow_schema

PREVIEW_CHARS = 200
SPARK_POINTS = 32

STEP_SCHEMA = arrow_schema("steps")
REQUEST_SCHEMA = arrow_schema("requests")
PASS_SCHEMA = arrow_schema("passes")

_FIELDS = tuple(field.name for field in MIDDLE)

_PROMPT_PARAMS = ("messages", "prompt", "suffix", "tools", "functions", "input")
_TOKEN_COLUMNS = (
    "token_id",
    "token_bytes",
    "small_choice",
    "large_choice",
    "small_topk_ids",
    "large_topk_ids",
)
_TOKEN_FIELDS = ("choice", "topk_ids")


class Capture(StrEnum):
    """How much is written down.

    full: everything. no_prompt: nothing of the prompt. signals: no text and no token ids at all, only
    numbers, decisions and guard values (still replayable).
    """

    FULL = "full"
    NO_PROMPT = "no_prompt"
    SIGNALS = "signals"


Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True)
class Life:
    """One choice as the tape sees it so far: its request row can be written at any moment.

    gateway: who serves it, in a fleet.
    """

    trace_no: int
    trace: Trace
    gateway: str | None = None
    stored: bool = False
    incomplete: bool = False
    tokens: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    gaps: dict[int, float] = field(default_factory=dict)
    audit: AuditStatus | None = None
    labels: dict[int, bool] = field(default_factory=dict)

    def see(self, step: Step) -> None:
        """Fold one step, new or restated."""
        if not step.written:
            return
        self.tokens[step.idx] = (step.token_id, step.token_bytes)
        if step.signals is not None:
            self.gaps[step.idx] = step.signals.gap
        if step.tier is not Tier.LARGE and step.audit_agrees is not None:
            self.labels[step.idx] = step.audit_agrees


def request_row(life: Life, capture: Capture, decode: Decode | None) -> dict[str, Any]:
    """The requests row of a choice, at admission or at its end."""
    trace = life.trace
    request, served, finished = trace.request, trace.served, trace.finished
    policy, sampling = request.policy, request.sampling
    full = capture is Capture.FULL
    prompt = decode(request.prompt_ids) if full and decode else None
    row: dict[str, Any] = {
        "trace_no": life.trace_no,
        "request_id": request.id,
        "choice": request.choice,
        "endpoint": request.endpoint,
        "model": request.model,
        "arm": request.arm,
        "policy_name": request.policy_name,
        "policy_hash": policy.hash,
        "policy": json.dumps(settings(policy)),
        "seed": sampling.seed if -(2**63) <= sampling.seed < 2**63 else None,
        "sampling": json.dumps(_sampling(asdict(sampling), capture)),
        "params": json.dumps(_params(request.params, capture), default=str),
        "prompt_ids": list(request.prompt_ids) if full else None,
        "prompt_text": _valid(prompt),
        "prompt_preview": _valid(_preview(request.params, prompt)) if full else None,
        "prompt_tokens": len(request.prompt_ids),
        "num_topk": request.num_topk,
        "kind": request.kind.value,
        "parent": request.parent,
        "forked_at": request.forked_at,
        "user_hash": request.user_hash,
        **asdict(served),
        "gateway": life.gateway,
        "capture": capture.value,
        "incomplete": life.incomplete,
        "interrupted": False,
        "received": request.received,
    }
    if finished is None:
        return row
    row |= asdict(finished.timings) | asdict(finished.counts) | {"received": request.received}
    counts = finished.counts
    row |= {
        "finish_reason": finished.reason.value,
        "stop": json.dumps(finished.stop) if _may_say_stop(finished.stop, capture) else None,
        "error": _valid(finished.error),
        "answer_text": _valid(_answer(life, decode)) if capture is not Capture.SIGNALS else None,
        "completion_tokens": counts.completion_tokens,
        "deferral_rate": _ratio(counts.large_tokens, counts.completion_tokens),
        "draft_acceptance_rate": _ratio(counts.num_accepted_draft_tokens, counts.num_draft_tokens),
        "mean_acceptance_length": (
            1 + counts.num_accepted_draft_tokens / counts.num_drafts if counts.num_drafts else None
        ),
        "min_gap": min(life.gaps.values(), default=None),
        "gap_spark": _spark([life.gaps[idx] for idx in sorted(life.gaps)]),
        "audited_tokens": len(life.labels),
        "audit_agreements": sum(life.labels.values()),
        "audit_status": life.audit.value if life.audit is not None else None,
    }
    return row


def request_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Requests rows as an Arrow table; a timing that has not happened is null."""
    return pa.Table.from_pylist([dict(row) for row in rows], schema=REQUEST_SCHEMA)


def step_table(steps: Sequence[Step], trace_nos: Sequence[int], capture: Capture) -> pa.Table:
    """Steps as an Arrow table in the tape's column order."""
    fields = zip(*map(structs.astuple, steps), strict=True) if steps else ((),) * len(Step.__struct_fields__)
    columns: dict[str, Iterable[Any]] = dict(zip(Step.__struct_fields__, fields, strict=True))
    signals, large_signals = columns["signals"], columns["large_signals"]
    small, large = columns["small_topk"], columns["large_topk"]
    columns |= {
        "trace_no": trace_nos,
        "top1_p": (s.top1_p if s else None for s in signals),
        "gap": (s.gap if s else None for s in signals),
        "entropy": (s.entropy if s else None for s in signals),
        "attn_entropy": (s.attn_entropy if s else None for s in signals),
        "hidden": (s.hidden if s else None for s in signals),
        "large_entropy": (s.entropy if s else None for s in large_signals),
        "large_attn_entropy": (s.attn_entropy if s else None for s in large_signals),
        "small_topk_ids": (k.ids if k else None for k in small),
        "small_topk_logprobs": (k.logprobs if k else None for k in small),
        "large_topk_ids": (k.ids if k else None for k in large),
        "large_topk_logprobs": (k.logprobs if k else None for k in large),
        "middle": ([_view(v, capture) for v in views] or None for views in columns["middle"]),
    }
    if capture is Capture.SIGNALS:
        columns |= {name: [None] * len(steps) for name in _TOKEN_COLUMNS}
    arrays = [pa.array(list(columns[column.name]), column.type) for column in STEP_SCHEMA]
    return pa.Table.from_arrays(arrays, schema=STEP_SCHEMA)


def _view(view: MiddleView, capture: Capture) -> dict[str, Any]:
    """An entry of `steps.middle`."""
    entry = {name: getattr(view, name, None) for name in _FIELDS}
    if view.signals is not None:
        entry |= structs.asdict(view.signals)
    if view.topk is not None:
        entry |= {"topk_ids": view.topk.ids, "topk_logprobs": view.topk.logprobs}
    if capture is Capture.SIGNALS:
        entry |= dict.fromkeys(_TOKEN_FIELDS)
    return entry


def pass_table(passes: Sequence[PassRecord]) -> pa.Table:
    """Passes as an Arrow table."""
    arrays = [pa.array([getattr(p, column.name) for p in passes], column.type) for column in PASS_SCHEMA]
    return pa.Table.from_arrays(arrays, schema=PASS_SCHEMA)


def _sampling(fields: dict[str, Any], capture: Capture) -> dict[str, Any]:
    if capture is Capture.SIGNALS:
        # Stop strings are text, and biased or stopping ids are token ids.
        return {k: v for k, v in fields.items() if k not in ("stop", "stop_token_ids", "logit_bias")}
    return fields


def _params(params: Mapping[str, Any], capture: Capture) -> dict[str, Any]:
    if capture is Capture.FULL:
        return dict(params)
    if capture is Capture.NO_PROMPT:
        return {name: value for name, value in params.items() if name not in _PROMPT_PARAMS}
    return {
        name: value
        for name, value in params.items()
        if isinstance(value, bool | int | float) or name in ("model", "routing")
    }


def _may_say_stop(stop: str | int | None, capture: Capture) -> bool:
    return stop is not None and capture is not Capture.SIGNALS


def _preview(params: Mapping[str, Any], prompt: str | None) -> str | None:
    messages = params.get("messages")
    for message in reversed(messages) if isinstance(messages, list | tuple) else ():
        if isinstance(message, Mapping) and message.get("role") == "user":
            content = message.get("content")
            if isinstance(content, str):
                return content[:PREVIEW_CHARS]
    return prompt[:PREVIEW_CHARS] if prompt is not None else None


def _answer(life: Life, decode: Decode | None) -> str:
    tokens = [life.tokens[idx] for idx in sorted(life.tokens)]
    if decode is not None:
        return decode([token_id for token_id, _ in tokens])
    return b"".join(text for _, text in tokens).decode("utf-8", "replace")


def _spark(values: Sequence[float]) -> list[float]:
    count = min(SPARK_POINTS, len(values))
    edges = [len(values) * i // count for i in range(count + 1)] if count else []
    return [sum(values[low:high]) / (high - low) for low, high in pairwise(edges)]


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _valid(text: str | None) -> str | None:
    """Text as UTF-8 can hold it: lone surrogates, which a JSON body may carry, become "?"."""
    return text.encode("utf-8", "replace").decode("utf-8") if text is not None else None

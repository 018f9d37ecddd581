"""Bodies and queries of the replay debugger, feedback, rollouts and alerts endpoints."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from gateway.routing import Routing
from gateway.wire import Body, Moment, TokenId

Position = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Text = Annotated[str, Meta(max_length=4096)]
Name = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.:-]+$")]


class ChoiceQuery(Body, frozen=True, kw_only=True):
    """Which choice of a trace."""

    choice: Position = 0


class WhatIfRequest(Body, frozen=True, kw_only=True):
    """POST what-if: routing keys laid over the recorded policy."""

    routing: Routing


class ForkRequest(Body, frozen=True, kw_only=True):
    """POST fork: run again from output position `at`, where token_id is written if it is given."""

    at: Position
    token_id: TokenId | None = None
    routing: Routing | None = None


class DiffQuery(Body, frozen=True, kw_only=True):
    """Which choices of two traces are compared."""

    choice: Position = 0
    other_choice: Position = 0


class FleetQuery(Body, frozen=True, kw_only=True):
    """GET fleet: how long the answer may be held back until something changes, seconds."""

    wait_s: Annotated[float, Meta(ge=0.0, le=60.0)] = 0.0


class ExportQuery(Body, frozen=True, kw_only=True):
    """GET export."""

    format: Literal["jsonl", "parquet"] = "jsonl"


class TapeExportQuery(Body, frozen=True, kw_only=True):
    """GET tape/export: the file's format, and which traces go into it."""

    format: Literal["jsonl", "parquet"] = "jsonl"
    arm: Text | None = None
    finish_reason: Text | None = None
    since: Moment | None = None
    until: Moment | None = None
    q: Text | None = None


class FilterQuery(Body, frozen=True, kw_only=True):
    """Which traces advice and diagnosis look at; policy: a named one, by default the one in force."""

    policy: Text | None = None
    arm: Text | None = None
    finish_reason: Text | None = None
    since: Moment | None = None
    until: Moment | None = None
    q: Text | None = None


class ScoreRequest(Body, frozen=True, kw_only=True):
    """POST scores: a task metric known later, 0 (bad) to 1 (good)."""

    name: Name
    value: Share


class ReviewRequest(Body, frozen=True, kw_only=True):
    """POST reviews: a spot check."""

    verdict: Literal["good", "bad", "unsure"]
    note: Text | None = None
    reviewer: Annotated[str, Meta(max_length=256)] | None = None


class SampleQuery(Body, frozen=True, kw_only=True):
    """GET reviews/sample: how many answers are drawn."""

    n: Annotated[int, Meta(ge=1, le=500)] = 50


class RolloutRequest(Body, frozen=True, kw_only=True):
    """POST rollouts; the values are checked where rollouts are planned."""

    name: str
    canary: dict[str, Any]
    weight: float | None = None
    steps: list[float] | None = None
    margin: float | None = None
    alpha: float | None = None
    min_units: int | None = None
    min_step_s: float | None = None
    audit_rate: float | None = None


class SilenceRequest(Body, frozen=True, kw_only=True):
    """POST silences: matching alerts are not sent until ends_at (Unix s) or for duration_s."""

    matchers: dict[str, str]
    author: str
    comment: str | None = None
    duration_s: float | None = None
    ends_at: float | None = None

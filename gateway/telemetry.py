"""OpenTelemetry: a span a request, an event a model pass, and metrics, sent by OTLP over HTTP.

Needs the extra `otel`. Without `[otel] endpoint` nothing here is loaded. Spans and metrics leave on the SDK's
own threads; a receiver that is away costs them, never an answer.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.span import TraceState
from opentelemetry.trace.status import Status, StatusCode

from gateway import genai
from gateway.config import OtelConfig
from gateway.core import Finished, Tick
from gateway.genai import Answered, Asked, attributes
from gateway.request import Request, Trace
from gateway.trace_context import TraceContext

SCOPE = "tokentape"
END_S = 5.0
"""Longest wait at the end for what is still to be sent."""


class Telemetry:
    """Spans of running requests: `begin` and `end` are the API's; an observer of the engine for passes."""

    def __init__(
        self, config: OtelConfig, resource: Resource, spans: SpanProcessor, metrics: MetricReader
    ) -> None:
        """spans, metrics: where they go."""
        self._tracers = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.sample)),
            resource=resource,
            span_limits=SpanLimits(max_events=config.max_events),
            shutdown_on_exit=False,
        )
        self._tracers.add_span_processor(spans)
        views = [
            View(instrument_name=name, aggregation=ExplicitBucketHistogramAggregation(edges))
            for name, edges in genai.BUCKETS.items()
        ]
        self._meters = MeterProvider([metrics], resource, shutdown_on_exit=False, views=views)
        self._tracer = self._tracers.get_tracer(SCOPE)
        meter = self._meters.get_meter(SCOPE)
        self._histograms = {name: meter.create_histogram(name, unit="s") for name in genai.METRICS}
        self._tokens = meter.create_counter(genai.TOKENS, unit="{token}")
        self._open: dict[str, tuple[Span, Asked]] = {}
        self._lock = threading.Lock()

    # --- the API's side ---

    def begin(self, requests: tuple[Request, ...]) -> tuple[Request, ...]:
        """Open the span of a client's request; its choices, carrying the span's context."""
        asked = Asked(requests)
        first = asked.first
        known = attributes(genai.AT_START, asked)
        span = self._tracer.start_span(
            f"{known['gen_ai.operation.name']} {first.model}".strip(),
            context=_parent(first.context),
            kind=SpanKind.SERVER,
            attributes=known,
            start_time=_ns(first.received),
        )
        context = _carried(span.get_span_context())
        with self._lock:
            self._open[first.id] = span, asked
        return tuple(replace(request, context=context) for request in requests)

    def end(self, request_id: str, ended: tuple[Finished, ...]) -> None:
        """The request has left; ended: its choices' ends, as far as they were seen. Any id may be given."""
        with self._lock:
            span, asked = self._open.pop(request_id, (None, None))
        if span is None or asked is None:
            return
        now = time.time()
        answered = Answered(asked, ended, now)
        known = attributes(genai.AT_END, answered)
        span.set_attributes(known)
        if answered.error is not None:
            span.set_status(Status(StatusCode.ERROR, answered.error))
        span.end(_ns(now))
        known |= attributes(genai.AT_START, asked)
        labels = {name: known[name] for name in genai.ON_METRICS if name in known}
        for name, read in genai.METRICS.items():
            value = read(answered)
            if value is not None:
                self._histograms[name].record(value, labels)
        for tier, of in genai.WRITTEN_BY.items():
            self._tokens.add(answered.total(of), {**labels, "tokentape.tier": tier})

    # --- the engine's side: never waits ---

    def on_admit(self, trace: Trace) -> None:
        """A choice was taken in: nothing to tell."""

    def on_tick(self, tick: Tick) -> None:
        """The tick's pass, as an event of every request whose tokens it settled."""
        if tick.passed is None:
            return
        known = None
        for request_id in {step.request_id for step in tick.steps}:
            span, _ = self._open.get(request_id, (None, None))
            if span is not None and span.is_recording():
                known = known or attributes(genai.AT_PASS, tick.passed)
                span.add_event(genai.PASS_EVENT, known, _ns(tick.passed.ts))

    def on_finish(self, trace: Trace) -> None:
        """A choice is complete: the API closes its request's span."""

    def close(self) -> None:
        """Send what is left, for END_S seconds at most."""
        closing = threading.Thread(target=self._shut_down, name="otel-end", daemon=True)
        closing.start()
        closing.join(END_S)

    def _shut_down(self) -> None:
        self._tracers.shutdown()
        self._meters.shutdown()


def telemetry(config: OtelConfig, version: str, gateway: str | None) -> Telemetry:
    """Spans and metrics to the config's endpoint, which must be set."""
    assert config.endpoint is not None
    base = config.endpoint.rstrip("/")
    named = {"service.name": config.service_name, "service.version": version}
    resource = Resource.create({**named, "service.instance.id": gateway} if gateway else named)
    return Telemetry(
        config,
        resource,
        BatchSpanProcessor(OTLPSpanExporter(f"{base}/v1/traces")),
        PeriodicExportingMetricReader(
            OTLPMetricExporter(f"{base}/v1/metrics"), config.metrics_interval_s * 1000
        ),
    )


def _parent(context: TraceContext | None) -> Context:
    """A client's context as the parent; a fresh one without it, whatever this thread has."""
    empty = Context()
    if context is None:
        return empty
    return trace.set_span_in_context(
        NonRecordingSpan(
            SpanContext(
                int(context.trace_id, 16),
                int(context.span_id, 16),
                is_remote=True,
                trace_flags=TraceFlags(int(context.sampled)),
                trace_state=TraceState.from_header([context.state]),
            )
        ),
        empty,
    )


def _carried(span: SpanContext) -> TraceContext:
    return TraceContext(
        f"{span.trace_id:032x}",
        f"{span.span_id:016x}",
        span.trace_flags.sampled,
        span.trace_state.to_header(),
    )


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)

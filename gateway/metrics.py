"""Prometheus metrics: an observer of the engine, and gauges read when they are scraped.

Names are vLLM's with the prefix `tokentape:`; labels are closed sets, never a request, user or model name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from alerts.series import Key
from gateway.core import FinishReason, Outcome, Reason, Step, Tick, Tier
from gateway.request import Trace
from gateway.tier import Distant

# The `_created` series would double every counter for nothing that is asked here.
disable_created_metrics()  # type: ignore[no-untyped-call]

_LATENCY = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_SCORE = tuple(i / 10 for i in range(1, 11))
_GUARDS = frozenset({Reason.LOOP_GUARD, Reason.FACT_GUARD})


@dataclass(slots=True)
class _Watched:
    """What is remembered of a choice while it runs; last: Unix seconds of its last token."""

    arm: str
    last: float | None = None


class _Counts(Collector):
    """A counter by one label that somebody else keeps, read when scraped."""

    def __init__(self, name: str, text: str, label: str, read: Callable[[], dict[str, int]]) -> None:
        self._name, self._text, self._label, self._read = f"tokentape:{name}", text, label, read

    def collect(self) -> list[CounterMetricFamily]:
        """The counts so far."""
        family = CounterMetricFamily(self._name, self._text, labels=[self._label])
        for value, count in self._read().items():
            family.add_metric([value], count)
        return [family]


class _Alerts(Collector):
    """What rollouts and alerts say of themselves, read when scraped."""

    def __init__(self, read: Callable[[], dict[Key, float]]) -> None:
        self._read = read

    def collect(self) -> list[Metric]:
        """The samples, by name."""
        families: dict[str, Metric] = {}
        for (name, labels), value in self._read().items():
            kind = "counter" if name.endswith("_total") else "gauge"
            base = name.removesuffix("_total")
            family = families.setdefault(base, Metric(base, "Rollouts and alerts", kind))
            family.add_sample(name, dict(labels), value)
        return list(families.values())


class Metrics:
    """An observer of the engine: counts and times what it is told, on the worker's thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._watched: dict[tuple[str, int], _Watched] = {}
        self._audited: dict[str, tuple[int, int]] = {}
        histogram, counter = self._histogram, self._counter
        self._first_token = histogram("time_to_first_token_seconds", "From receipt to the first token")
        self._inter_token = histogram("inter_token_latency_seconds", "Between tokens of one choice")
        self._whole = histogram("e2e_request_latency_seconds", "From receipt to the end")
        self._queued = histogram("request_queue_time_seconds", "From receipt to a slot")
        self._prompt = counter("prompt_tokens", "Prompt tokens of admitted choices")
        self._generated = counter("generation_tokens", "Output tokens by who wrote them", ["tier"])
        self._ended = counter("request_success", "Choices that ended, by reason", ["finished_reason"])
        self._drafts = counter("spec_decode_num_drafts", "Verified draft runs")
        self._drafted = counter("spec_decode_num_draft_tokens", "Drafted tokens")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Drafted tokens that stood")
        self._degraded = counter("requests_degraded", "Choices that the small model wrote on alone")
        self._decisions = counter("routing_decisions", "The router's verdicts", ["arm", "action", "reason"])
        self._guards = counter("guard_hits", "Positions deferred by a guard", ["reason"])
        self._scores = Histogram(
            "tokentape:routing_score", "The routing score", ["arm"], buckets=_SCORE, registry=self.registry
        )
        self._agreement = Gauge(
            "tokentape:audit_agreement_ratio",
            "Share of examined tokens not written by the large model that are its own choice",
            ["arm"],
            registry=self.registry,
        )
        self._flush = histogram("tape_flush_seconds", "One commit of the tape")
        for tier in Tier:
            self._generated.labels(tier=tier.value)
        for reason in FinishReason:
            self._ended.labels(finished_reason=reason.value)

    def watch_engine(
        self, running: Callable[[], float], waiting: Callable[[], float], kv_usage: Callable[[], float]
    ) -> None:
        """Gauges of the engine: choices running and waiting, share of the KV blocks in use."""
        self._gauge("num_requests_running", "Choices that hold a slot").set_function(running)
        self._gauge("num_requests_waiting", "Choices that wait for a slot").set_function(waiting)
        self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1").set_function(kv_usage)

    def watch_large(self, large: Distant) -> None:
        """A large model elsewhere: whether it is asked, and tries of calls by how they ended."""
        up = self._gauge("large_available", "1 while calls to the large model go out")
        up.set_function(lambda: large.available)
        self.registry.register(
            _Counts("large_calls", "Tries of calls to it", "outcome", lambda: large.outcomes)
        )

    def watch_tape(self, depth: Callable[[], float], dropped: Callable[[], dict[str, int]]) -> None:
        """The tape's queue depth and its losses."""
        self._gauge("tape_queue_depth", "Rows handed over and not yet on disk").set_function(depth)
        self.registry.register(_Counts("tape_dropped", "Rows the tape lost", "cause", dropped))

    def watch_share(self, last_sync: Callable[[], float]) -> None:
        """When a fleet's share was last in step with this gateway, Unix seconds; 0 before the first time."""
        text = "When the fleet's share was last read and written to the end"
        self._gauge("share_last_sync_timestamp_seconds", text).set_function(last_sync)

    def watch_alerts(self, samples: Callable[[], dict[Key, float]]) -> None:
        """The canary's weight, drift evidence and webhook deliveries."""
        self.registry.register(_Alerts(samples))

    def on_flush(self, seconds: float) -> None:
        """The tape committed."""
        self._flush.observe(seconds)

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def on_admit(self, trace: Trace) -> None:
        """A choice was taken in."""
        self._watched[trace.request.id, trace.request.choice] = _Watched(trace.request.arm)
        self._prompt.inc(len(trace.request.prompt_ids))

    def on_tick(self, tick: Tick) -> None:
        """One turn of the engine."""
        for step in tick.steps:
            watched = self._watched.get((step.request_id, step.choice))
            if watched is not None:
                self._see(step, watched)
        for step in tick.restated:
            watched = self._watched.get((step.request_id, step.choice))
            if watched is not None and step.outcome is Outcome.KEPT:
                self._audit(step, watched.arm)

    def on_finish(self, trace: Trace) -> None:
        """A choice is complete."""
        self._watched.pop((trace.request.id, trace.request.choice), None)
        finished = trace.finished
        if finished is None:
            return
        counts, times = finished.counts, finished.timings
        self._ended.labels(finished_reason=finished.reason.value).inc()
        self._degraded.inc(counts.degraded)
        self._drafts.inc(counts.num_drafts)
        self._drafted.inc(counts.num_draft_tokens)
        self._accepted.inc(counts.num_accepted_draft_tokens)
        if times.admitted is not None:
            self._queued.observe(max(0.0, times.admitted - times.received))
        if times.first_token is not None:
            self._first_token.observe(max(0.0, times.first_token - times.received))
        if times.finished is not None:
            self._whole.observe(max(0.0, times.finished - times.received))

    def _see(self, step: Step, watched: _Watched) -> None:
        arm = watched.arm
        if step.action is not None and step.reason is not None:
            self._decisions.labels(arm, step.action.value, step.reason.value).inc()
            if step.reason in _GUARDS:
                self._guards.labels(step.reason.value).inc()
        if step.score is not None:
            self._scores.labels(arm).observe(step.score)
        if step.outcome is not Outcome.DISCARDED:
            self._audit(step, arm)
        if step.written:
            self._generated.labels(step.tier.value).inc()
            if watched.last is not None:
                self._inter_token.observe(max(0.0, step.ts - watched.last))
            watched.last = step.ts

    def _audit(self, step: Step, arm: str) -> None:
        """Count a token of the small model that the large one has examined."""
        if step.audit_agrees is None or step.tier is Tier.LARGE:
            return
        examined, agreed = self._audited.get(arm, (0, 0))
        examined, agreed = examined + 1, agreed + step.audit_agrees
        self._audited[arm] = examined, agreed
        self._agreement.labels(arm).set(agreed / examined)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"tokentape:{name}", text, buckets=_LATENCY, registry=self.registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] | list[str] = ()) -> Counter:
        return Counter(f"tokentape:{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"tokentape:{name}", text, registry=self.registry)

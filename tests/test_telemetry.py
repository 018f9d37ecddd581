"""OpenTelemetry: what is sent of a request, under whose trace, and that nothing is there without it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics
from opentelemetry.trace import SpanKind, StatusCode
from serving import TINY, FakeGateway, fake_gateway
from tape_fakes import finished, request, step

from gateway import cli, genai
from gateway.config import OtelConfig
from gateway.core import Counts, FinishReason, PassRecord, Tick, Tier
from gateway.telemetry import Telemetry, telemetry
from gateway.trace_context import TraceContext, context_headers, read_context

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
BODY = {"model": "tiny", "prompt": "once", "max_tokens": 6, "temperature": 0, "seed": 3}


class Told:
    """A Telemetry whose spans and metrics stay in memory."""

    def __init__(self, **config: Any) -> None:
        self.exporter, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.telemetry = Telemetry(
            OtelConfig(**config), Resource.create({}), SimpleSpanProcessor(self.exporter), self.reader
        )

    @property
    def spans(self) -> tuple[Any, ...]:
        return self.exporter.get_finished_spans()

    def metrics(self) -> dict[str, Any]:
        """Data points by metric name."""
        data = self.reader.get_metrics_data()
        return {
            metric.name: list(metric.data.data_points)
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


@pytest.fixture
def told() -> Iterator[Told]:
    built = Told()
    yield built
    built.telemetry.close()


@contextmanager
def traced(told: Told) -> Iterator[FakeGateway]:
    """A gateway that tells."""
    with fake_gateway(TINY) as gateway:
        gateway.service.telemetry = told.telemetry
        gateway.worker.observers.append(told.telemetry)
        yield gateway


def test_a_span_a_request_with_its_passes(told: Told) -> None:
    (asked,) = told.telemetry.begin((request("r1", endpoint="/v1/chat/completions", model="tiny"),))
    for number, tier in enumerate((Tier.LARGE, Tier.SMALL)):
        passed = PassRecord(number, number, tier, 2, 3, 40, 1.5, 0.1, False, 1001.0 + number)
        told.telemetry.on_tick(Tick(number, passed, [], [step("r1", number), step("other", 0)]))
    counts = Counts(small_tokens=2, large_tokens=1, num_draft_tokens=4, num_accepted_draft_tokens=2)
    told.telemetry.end("r1", (finished(counts=counts),))
    (span,) = told.spans
    assert (span.name, span.kind, span.parent) == ("chat tiny", SpanKind.SERVER, None)
    assert span.start_time == 1000 * 10**9
    assert {n: span.attributes[n] for n in span.attributes if n.startswith("gen_ai")} == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tokentape",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.seed": 7,
        "gen_ai.response.id": "r1",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.response.time_to_first_chunk": 1.0,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 3,
    }
    assert [(e.name, e.attributes["tokentape.pass.tier"], e.timestamp) for e in span.events] == [
        ("tokentape.pass", "large", 1001 * 10**9),
        ("tokentape.pass", "small", 1002 * 10**9),
    ]
    assert asked.context == TraceContext(
        f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}", sampled=True
    )
    assert span.attributes["tokentape.accepted_draft_tokens"] == 2


def test_every_name_is_one_of_the_conventions_or_ours() -> None:
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    known |= {value for name, value in vars(gen_ai_metrics).items() if name.startswith("GEN_AI_")}
    used = {*genai.AT_START, *genai.AT_END, *genai.AT_PASS, *genai.METRICS, genai.TOKENS, genai.PASS_EVENT}
    assert {name for name in used if not name.startswith("tokentape.")} - {"error.type"} <= known
    assert set(genai.BUCKETS) == set(genai.METRICS)
    assert set(genai.ON_METRICS) <= {*genai.AT_START, *genai.AT_END}


def test_metrics_in_seconds_and_tokens_by_tier(told: Told) -> None:
    told.telemetry.begin((request("r1", endpoint="/v1/completions", model="tiny"),))
    end = finished(counts=Counts(small_tokens=2, large_tokens=3), first_token=1000.5, finished=1002.5)
    told.telemetry.end("r1", (end,))
    found = told.metrics()
    (ttft,), (per_token,) = (found[f"gen_ai.server.time_{n}"] for n in ("to_first_token", "per_output_token"))
    assert (ttft.sum, ttft.count, per_token.sum) == (0.5, 1, 0.5)
    assert ttft.explicit_bounds == genai.BUCKETS["gen_ai.server.time_to_first_token"]
    assert dict(ttft.attributes) == {
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "tokentape",
        "gen_ai.request.model": "tiny",
    }  # fmt: skip
    tokens = {p.attributes["tokentape.tier"]: p.value for p in found["tokentape.output_tokens"]}
    assert {tier: n for tier, n in tokens.items() if n} == {"small": 2, "large": 3}


@pytest.mark.parametrize(
    ("ended", "error"),
    [
        ((), "cancelled"),
        ((finished(FinishReason.LENGTH),), "cancelled"),
        ((finished(), finished()), None),
    ],
)
def test_choices_that_never_ended_are_an_error(told: Told, ended: tuple[Any, ...], error: str | None) -> None:
    told.telemetry.begin((request("r1"), request("r1", choice=1)))
    told.telemetry.end("r1", ended)
    told.telemetry.end("r1", ended)
    (span,) = told.spans
    assert span.attributes.get("error.type") == error
    assert span.status.status_code is (StatusCode.UNSET if error is None else StatusCode.ERROR)
    assert span.attributes["gen_ai.request.choice.count"] == 2


def test_over_http_the_clients_trace_goes_on(told: Told) -> None:
    with traced(told) as gateway:
        headers = {"traceparent": PARENT, "tracestate": "vendor=1"}
        answer = gateway.post("/v1/completions", BODY, headers=headers)
        assert answer.status_code == 200
    (span,) = told.spans
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, SPAN)
    (asked,) = gateway.worker.seen
    # What the engine of the large model would be sent: the same trace, under our span.
    assert context_headers(asked.context) == {
        "traceparent": f"00-{TRACE}-{span.context.span_id:016x}-01",
        "tracestate": "vendor=1",
    }
    assert span.attributes["gen_ai.response.id"] == answer.json()["id"]
    assert span.attributes["gen_ai.usage.output_tokens"] == answer.json()["usage"]["completion_tokens"]


def test_an_unsampled_trace_is_passed_on_and_not_sent(told: Told) -> None:
    with traced(told) as gateway:
        gateway.post("/v1/completions", BODY, headers={"traceparent": f"00-{TRACE}-{SPAN}-00"})
    assert told.spans == ()
    assert gateway.worker.seen[0].context.sampled is False
    assert gateway.worker.seen[0].context.trace_id == TRACE


def test_a_share_of_zero_sends_only_what_clients_ask_for() -> None:
    told = Told(sample=0.0)
    told.telemetry.begin((request("r1"),))
    told.telemetry.begin((request("r2", context=read_context(PARENT)),))
    for name in ("r1", "r2"):
        told.telemetry.end(name, (finished(),))
    assert [span.attributes["gen_ai.response.id"] for span in told.spans] == ["r2"]
    told.telemetry.close()


def test_the_latest_passes_are_kept() -> None:
    told = Told(max_events=3)
    told.telemetry.begin((request("r1"),))
    for number in range(10):
        passed = PassRecord(number, number, Tier.LARGE, 1, 1, 1, 1.0, 0.0, False, 1001.0)
        told.telemetry.on_tick(Tick(number, passed, [], [step("r1", number)]))
    told.telemetry.end("r1", (finished(),))
    assert [event.attributes["tokentape.pass.id"] for event in told.spans[0].events] == [7, 8, 9]
    told.telemetry.close()


def test_without_it_the_clients_trace_passes_through() -> None:
    with fake_gateway(TINY) as gateway:
        gateway.post("/v1/completions", BODY, headers={"traceparent": PARENT})
        gateway.post("/v1/completions", BODY)
    first, second = gateway.worker.seen
    assert context_headers(first.context) == {"traceparent": PARENT}
    assert context_headers(second.context) == {}


@pytest.mark.parametrize(
    "traceparent",
    [
        None, "", "garbage", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01-more", f"00-{TRACE}-{SPAN}", "x" * 10_000,
    ],
)  # fmt: skip
def test_what_the_specification_calls_invalid_is_no_trace(traceparent: str | None) -> None:
    assert read_context(traceparent, "a=1") is None


def test_later_versions_and_odd_states() -> None:
    assert read_context(f"01-{TRACE}-{SPAN}-03-more") == TraceContext(TRACE, SPAN, True)
    assert read_context(PARENT, "a=1\r\nx: y") == TraceContext(TRACE, SPAN, True)
    assert read_context(PARENT, "a=" + "1" * 600) == TraceContext(TRACE, SPAN, True)
    assert read_context(PARENT, " a=1 ") == TraceContext(TRACE, SPAN, True, "a=1")


class Receiver(BaseHTTPRequestHandler):
    """An OTLP/HTTP collector."""

    protocol_version = "HTTP/1.1"
    got: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.got.append((self.path, body))
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Not in the tests' output."""


def test_a_receiver_gets_traces_and_metrics_by_otlp() -> None:
    Receiver.got = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = OtelConfig(endpoint=f"http://127.0.0.1:{server.server_port}/", service_name="mine")
    sent = telemetry(config, "0.1", "east")
    sent.begin((request("r1", model="tiny", context=read_context(PARENT)),))
    sent.end("r1", (finished(counts=Counts(large_tokens=4)),))
    sent.close()
    server.shutdown()
    server.server_close()
    spans = [
        ExportTraceServiceRequest.FromString(body) for path, body in Receiver.got if path == "/v1/traces"
    ]
    (resource,) = spans[0].resource_spans
    about = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert (about["service.name"], about["service.instance.id"]) == ("mine", "east")
    (span,) = resource.scope_spans[0].spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, SPAN)
    metrics = [ExportMetricsServiceRequest.FromString(b) for path, b in Receiver.got if path == "/v1/metrics"]
    names = {m.name for m in metrics[-1].resource_metrics[0].scope_metrics[0].metrics}
    assert names == {*genai.METRICS, genai.TOKENS}


def test_without_the_extra_the_start_is_refused_by_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "gateway.telemetry", raising=False)
    monkeypatch.setenv("TOKENTAPE_OTEL_ENDPOINT", "http://127.0.0.1:4318")
    status = cli.main(["serve", "--preset", "tiny", "--no-ui", "--port", "0", "--data-dir", str(tmp_path)])
    told = capsys.readouterr().err.splitlines()[-1]
    assert status == 2
    assert told.startswith("tokentape: otel.endpoint: needs the extra `otel`")


def test_off_it_is_not_even_loaded() -> None:
    code = "import sys, gateway.app; sys.exit(any(m.startswith('opentelemetry') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

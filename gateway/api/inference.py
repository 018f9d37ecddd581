"""POST /v1/completions and POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import msgspec
import structlog
from litestar import Request, Response, post

from gateway.access import Scope
from gateway.api.bodies import read_body
from gateway.api.chat import ChatForm
from gateway.api.completion import CompletionForm
from gateway.api.errors import ApiError, as_api_error, unavailable
from gateway.api.form import Form
from gateway.api.guard import caller
from gateway.api.live import Cancelled, Failed, Live, TooLate
from gateway.api.plan import Arm, Origin, chosen, plan_completion
from gateway.api.plan_chat import plan_chat
from gateway.api.route import Route
from gateway.api.service import Service, clash, service_of
from gateway.api.stream import DONE, KEEP_ALIVE, EventStream, disconnected, event
from gateway.api.tools import constraint_of, wants_grammar
from gateway.core import Mode
from gateway.request import Request as Planned
from gateway.trace_context import TraceContext, read_context
from gateway.wire import CompletionRequest, DecodingRequest
from gateway.wire_chat import ChatRequest
from gateway.wire_out import ChatCompletion, Completion

EVENTS = "text/event-stream"
LONG_BODY = 50_000
"""Bytes; about 10 ms of tokenizing."""

log = structlog.get_logger("gateway")

HttpRequest = Request[Any, Any, Any]


@post(
    "/v1/completions",
    status_code=200,
    opt=Route(Scope.INFER, body=CompletionRequest, returns=Completion, also={EVENTS: None}, infers=True).opt,
)
async def completions(request: HttpRequest) -> Response[bytes]:
    """Complete one or several prompts."""
    service = service_of(request.app.state)
    body = await read_body(request, CompletionRequest)
    engine = service.engine_or_503()
    service.check_model(body.model)
    origin = await _origin(request, service, "cmpl", "/v1/completions")
    arm, limits = _arm(request, service, body, origin), service.limits(engine)
    requests = await _planned(
        request, lambda: plan_completion(body, origin, arm, service.policies, engine.tokenizer, limits)
    )
    form = CompletionForm(body, requests, engine.tokenizer, int(origin.received))
    return await _serve(request, service, Live(engine, requests), form, body)


@post(
    "/v1/chat/completions",
    status_code=200,
    opt=Route(Scope.INFER, body=ChatRequest, returns=ChatCompletion, also={EVENTS: None}, infers=True).opt,
)
async def chat_completions(request: HttpRequest) -> Response[bytes]:
    """Answer a chat."""
    service = service_of(request.app.state)
    body = await read_body(request, ChatRequest)
    engine = service.engine_or_503()
    service.check_model(body.model)
    constraint = None
    if wants_grammar(body):
        # Compiling takes up to a second, in which others must go on.
        constraint = await asyncio.to_thread(lambda: constraint_of(body, service.grammars()))
    origin = await _origin(request, service, "chatcmpl", "/v1/chat/completions")
    arm, limits = _arm(request, service, body, origin), service.limits(engine)
    requests = await _planned(
        request,
        lambda: plan_chat(body, origin, arm, service.policies, engine.tokenizer, limits, constraint),
    )
    form = ChatForm(body, requests, engine.tokenizer, int(origin.received))
    return await _serve(request, service, Live(engine, requests), form, body)


def _arm(request: HttpRequest, service: Service, body: DecodingRequest, origin: Origin) -> Arm:
    """Stable or canary, by the body's user, the x-user-id header, or the request; a share in shadow."""
    arm = service.arm(origin.id, body.user, request.headers.get("x-user-id"))
    rate = service.config.server.shadow_rate
    # What a client asked for by name is what it gets.
    if body.routing is None and arm.policy.mode is Mode.ROUTED and chosen("shadow", origin.id, rate):
        return replace(arm, policy=replace(arm.policy, mode=Mode.SHADOW))
    return arm


async def _planned(request: HttpRequest, plan: Callable[[], tuple[Planned, ...]]) -> tuple[Planned, ...]:
    """Run a plan; in a thread where turning a long prompt into tokens would hold others up."""
    if len(await request.body()) < LONG_BODY:
        return plan()
    return await asyncio.to_thread(plan)


async def _origin(request: HttpRequest, service: Service, prefix: str, endpoint: str) -> Origin:
    """The trace id: the client's own if it sent one (409 on a clash), else a fresh one."""
    received = service.clock()
    given = request.scope["state"].get("client_request_id")
    if given is None:
        trace_id = service.new_id(prefix)
    else:
        trace_id = given
        if await asyncio.to_thread(service.id_is_taken, trace_id):
            raise clash(trace_id)
    request.scope["state"]["request_id"] = trace_id
    key = caller(request.scope["state"])
    return Origin(trace_id, endpoint, received, scope=key, context=context_of(request))


def context_of(request: HttpRequest) -> TraceContext | None:
    """The W3C trace that the client's call belongs to."""
    return read_context(request.headers.get("traceparent"), request.headers.get("tracestate"))


async def _serve(
    request: HttpRequest, service: Service, live: Live, form: Form, body: DecodingRequest
) -> Response[bytes]:
    access, key = request.scope["state"]["access"], caller(request.scope["state"])
    service.start(live, key)
    if body.stream:
        return EventStream(
            _events(service, live, form, access),
            service.config.server.send_timeout_s,
            on_end=lambda: _leave(service, live, form, access, key),
        )
    try:
        answer = await _whole(request, service, live, form)
    finally:
        _leave(service, live, form, access, key)
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _whole(request: HttpRequest, service: Service, live: Live, form: Form) -> Any:
    """The answer once every choice has ended; a client who leaves earlier frees the slots."""
    server = service.config.server

    async def collect() -> None:
        async for delta in live.deltas(server.keepalive_s, server.request_timeout_s):
            if delta is not None:
                form.add(delta)

    collecting = asyncio.create_task(collect())
    leaving = asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            raise ApiError(499, "The client closed the connection", code="client_closed_request")
        collecting.result()
        return form.whole()
    except (Failed, Cancelled, TooLate) as error:
        raise _ended_early(error, service) from None
    finally:
        for task in (collecting, leaving):
            task.cancel()
        await asyncio.gather(collecting, leaving, return_exceptions=True)


async def _events(
    service: Service, live: Live, form: Form, access: dict[str, Any]
) -> AsyncGenerator[bytes, None]:
    """Chunks as they come; whatever fails becomes an error event, never a silent cut."""
    server = service.config.server
    try:
        for chunk in form.opening():
            yield event(chunk)
        async for delta in live.deltas(server.keepalive_s, server.request_timeout_s):
            if delta is None:
                yield KEEP_ALIVE
                continue
            form.add(delta)
            for chunk in form.chunks(delta):
                yield event(chunk)
        for chunk in form.closing():
            yield event(chunk)
        yield DONE
    except (Failed, Cancelled, TooLate) as error:
        told = _ended_early(error, service)
        access["error"] = told.code
        yield event(told.envelope)
    except Exception as error:
        log.exception("stream_failed", request_id=live.id)
        yield event(as_api_error(error).envelope)


def _leave(service: Service, live: Live, form: Form, access: dict[str, Any], key: str) -> None:
    """Free what is held, book the tokens, and say in the access log what came of it."""
    usage = form.usage()
    service.end(live, key, usage.total_tokens)
    access.update(form.summary())


def _ended_early(error: Failed | Cancelled | TooLate, service: Service) -> ApiError:
    if isinstance(error, TooLate):
        seconds = service.config.server.request_timeout_s
        return ApiError(504, f"The answer was not complete after {seconds:g} s", code="deadline_exceeded")
    if isinstance(error, Cancelled):
        return ApiError(
            503,
            "The gateway ended this request: it is shutting down",
            code="aborted",
            headers={"retry-after": "5"},
        )
    if error.retry_after_s is not None:
        return unavailable(error.retry_after_s)
    return ApiError(500, f"The engine failed on this request: {error}", code="engine_error")

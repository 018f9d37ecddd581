"""What people and later systems say of an answer: task scores and spot checks."""

from __future__ import annotations

import asyncio
from typing import Any

from litestar import Request, Response, get, post
from litestar.params import FromPath

from gateway.access import Scope
from gateway.api.bodies import read_body, read_query
from gateway.api.errors import ApiError
from gateway.api.models import as_json
from gateway.api.route import Route
from gateway.api.service import Service, service_of
from gateway.api.traces import summary
from gateway.wire_debug import ReviewRequest, SampleQuery, ScoreRequest
from logs.feedback import Feedback

HttpRequest = Request[Any, Any, Any]


@post(
    "/v1/traces/{trace_id:str}/scores",
    status_code=201,
    opt=Route(Scope.INFER, body=ScoreRequest, returns=dict[str, Any], status=201).opt,
)
async def post_score(request: HttpRequest, trace_id: FromPath[str]) -> Response[bytes]:
    """Record a task metric that became known later; it feeds drift evidence like any other metric."""
    service, body = service_of(request.app.state), await read_body(request, ScoreRequest)
    await summary(service, trace_id)
    await asyncio.to_thread(_feedback(service).score, trace_id, body.name, body.value)
    if service.alerts is not None:
        service.alerts.score(trace_id, body.name, body.value)
    return as_json({"id": trace_id, "name": body.name, "value": body.value}, status=201)


@post(
    "/v1/traces/{trace_id:str}/reviews",
    status_code=201,
    opt=Route(Scope.READ, body=ReviewRequest, returns=dict[str, Any], status=201).opt,
)
async def post_review(request: HttpRequest, trace_id: FromPath[str]) -> Response[bytes]:
    """Record a spot check."""
    service, body = service_of(request.app.state), await read_body(request, ReviewRequest)
    await summary(service, trace_id)
    feedback = _feedback(service)
    await asyncio.to_thread(feedback.review, trace_id, body.verdict, body.note, body.reviewer)
    return as_json({"id": trace_id, "verdict": body.verdict}, status=201)


@get("/v1/reviews/sample", opt=Route(Scope.READ, query=SampleQuery, returns=dict[str, Any]).opt)
async def get_sample(request: HttpRequest) -> Response[bytes]:
    """Finished answers that nobody has reviewed, drawn at random."""
    service, query = service_of(request.app.state), read_query(request, SampleQuery)
    return as_json({"data": await asyncio.to_thread(_feedback(service).sample, query.n)})


def _feedback(service: Service) -> Feedback:
    if service.recorder is None:
        raise ApiError(503, "The tape is not open", code="not_ready", headers={"retry-after": "5"})
    return service.recorder.feedback()

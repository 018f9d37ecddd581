"""Whether recorded decisions replay: of one trace, or of the whole tape."""

from __future__ import annotations

import asyncio
from typing import Any

from litestar import Request, Response, get
from litestar.params import FromPath

from gateway.access import Scope
from gateway.api.models import as_json
from gateway.api.route import Route
from gateway.api.service import service_of
from gateway.api.traces import no_trace, reader_of
from gateway.replay_report import ReplayReport, replay_tape, replay_trace

HttpRequest = Request[Any, Any, Any]


@get("/v1/replay", opt=Route(Scope.READ, returns=ReplayReport).opt)
async def replay_all(request: HttpRequest) -> Response[bytes]:
    """Recompute every decision on the tape."""
    reader = reader_of(service_of(request.app.state))
    return as_json(await asyncio.to_thread(replay_tape, reader))


@get("/v1/traces/{trace_id:str}/replay", opt=Route(Scope.READ, returns=ReplayReport).opt)
async def replay_one(request: HttpRequest, trace_id: FromPath[str]) -> Response[bytes]:
    """Recompute every decision of one trace."""
    service = service_of(request.app.state)
    reader = reader_of(service)
    report = await asyncio.to_thread(replay_trace, reader, trace_id)
    if report is None:
        raise no_trace(service, trace_id)
    return as_json(report)

"""GET /health, /ready and /metrics."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, get

from gateway.api.errors import ApiError
from gateway.api.models import as_json
from gateway.api.route import Route
from gateway.api.service import service_of
from gateway.wire_out import Health

HttpRequest = Request[Any, Any, Any]


@get("/health", opt=Route(None, returns=Health).opt)
async def health(request: HttpRequest) -> Response[bytes]:
    """Whether the process lives."""
    return as_json(Health(status="ok"))


@get("/ready", opt=Route(None, returns=Health).opt)
async def ready(request: HttpRequest) -> Response[bytes]:
    """Whether a request would be taken now: 503 while loading, draining or full."""
    service = service_of(request.app.state)
    if service.ready:
        return as_json(Health(status="ready"))
    status = "draining" if service.draining else "loading" if service.engine is None else "full"
    raise ApiError(503, f"Not ready: {status}", code=status, headers={"retry-after": "5"})


@get("/metrics", opt=Route(None, also={"text/plain": None}).opt)
async def metrics(request: HttpRequest) -> Response[bytes]:
    """Prometheus' text format."""
    service = service_of(request.app.state)
    return Response(service.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

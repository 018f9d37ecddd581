"""GET /v1/fleet: what gateways that follow this one must do; held back, if they ask so, until it changes."""

from __future__ import annotations

import asyncio
from typing import Any

from litestar import Request, Response, get

from alerts.orders import Orders
from alerts.service import AlertsService, Follows
from gateway.access import Scope
from gateway.api.bodies import read_query
from gateway.api.errors import ApiError
from gateway.api.route import JSON, Route
from gateway.api.service import service_of
from gateway.wire_debug import FleetQuery

HttpRequest = Request[Any, Any, Any]
LOOK_S = 0.25
"""How often a held answer looks whether it is due."""


@get("/v1/fleet", opt=Route(Scope.READ, query=FleetQuery, returns=dict[str, Any], conflicts=True).opt)
async def get_fleet(request: HttpRequest) -> Response[bytes]:
    """The policy in force and the canary's, with who gets it; 304 while `if-none-match` still names them."""
    query, service = read_query(request, FleetQuery), service_of(request.app.state)
    if service.alerts is None:
        raise ApiError(503, "The gateway is still starting", code="not_ready", headers={"retry-after": "5"})
    known = request.headers.get("if-none-match")
    loop = asyncio.get_running_loop()
    deadline = loop.time() + query.wait_s
    orders = _orders(service.alerts)
    while orders.etag == known and loop.time() < deadline and not service.draining:
        await asyncio.sleep(LOOK_S)
        orders = _orders(service.alerts)
    headers = {"etag": orders.etag, "cache-control": "no-cache"}
    if orders.etag == known:
        return Response(b"", status_code=304, media_type=JSON, headers=headers)
    return Response(orders.body, media_type=JSON, headers=headers)


def _orders(alerts: AlertsService) -> Orders:
    try:
        return alerts.orders
    except Follows as error:
        raise ApiError(409, str(error), code="not_control") from None

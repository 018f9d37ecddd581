"""The outermost ASGI layer: request ids, the access log, and nothing ever without an answer."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import structlog
from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

from gateway.api.errors import envelope
from gateway.api.service import REQUEST_ID, Service

access_log = structlog.get_logger("access")
BAD_ID = "x-request-id: expected 1 to 128 letters, digits, dots, underscores or hyphens"
GATEWAY_HEADER = b"x-tokentape-gateway"
QUIET_PATHS = frozenset({"/health", "/ready", "/metrics", "/v1/fleet"})
"""Polled by machines: logged at debug level."""


class Front:
    """Gives every request an id and every response the header `x-request-id`, and in a fleet the gateway's
    name; logs one line a request.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        name = service.config.fleet.name
        self._named = [] if name is None else [(GATEWAY_HEADER, name.encode())]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == ScopeType.HTTP:
            await self._serve(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _serve(self, scope: HTTPScope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        state: dict[str, Any] = {**(scope.get("state") or {}), "access": {}}
        scope["state"] = state
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), None)
        client_id = given.decode("latin-1") if given is not None else None
        valid = client_id is None or REQUEST_ID.fullmatch(client_id) is not None
        state["request_id"] = client_id if client_id and valid else self._service.new_id("req")
        if client_id is not None and valid:
            state["client_request_id"] = client_id
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message["headers"], (b"x-request-id", state["request_id"].encode()), *self._named]
                message = {**message, "headers": headers}
            await send(message)

        try:
            if not valid:
                await _refuse(send_with_id, 400, BAD_ID, "x-request-id", "invalid_value")
            elif _header_bytes(scope) > self._service.config.server.max_header_kib * 1024:
                await _refuse(
                    send_with_id, 431, "The request headers are too large", None, "headers_too_large"
                )
            else:
                await self._app(scope, receive, send_with_id)
        finally:
            path = scope["path"]
            write = access_log.debug if path in QUIET_PATHS else access_log.info
            write(
                "request",
                request_id=state["request_id"],
                method=scope["method"],
                path=path,
                status=status,
                ms=round((time.perf_counter() - began) * 1000, 1),
                **state["access"],
            )


def _header_bytes(scope: HTTPScope) -> int:
    return sum(len(name) + len(value) for name, value in scope["headers"])


async def _refuse(send: Send, status: int, message: str, param: str | None, code: str) -> None:
    body = msgspec.json.encode(envelope(status, message, param, code))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})

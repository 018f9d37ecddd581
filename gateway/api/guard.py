"""Who may call a route: keys with its scope."""

from __future__ import annotations

from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers.base import BaseRouteHandler

from gateway.access import Key
from gateway.api.errors import ApiError
from gateway.api.route import route_of
from gateway.api.service import service_of


def check_key(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    """ApiError 401 without a valid key, 403 where the key lacks the route's scope."""
    keys = service_of(connection.app.state).keys
    scope = route_of(dict(handler.opt)).scope
    if not keys or scope is None:
        return
    key = keys.find(_secret(connection))
    if key is None:
        raise ApiError(
            401,
            "A valid API key is needed: send it as `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
    if scope not in key.scopes:
        raise ApiError(403, f"This key may not do that: it lacks the scope {scope}", code="missing_scope")
    _remember(connection, key)


def caller(state: dict[str, Any]) -> str:
    """The name of the key behind a request; empty where none is needed."""
    name: str = state.get("key", "")
    return name


def _secret(connection: ASGIConnection[Any, Any, Any, Any]) -> str:
    kind, _, secret = connection.headers.get("authorization", "").partition(" ")
    return secret.strip() if kind.lower() == "bearer" else ""


def _remember(connection: ASGIConnection[Any, Any, Any, Any], key: Key) -> None:
    state = connection.scope["state"]
    state["key"] = key.name
    state["access"]["key"] = key.name

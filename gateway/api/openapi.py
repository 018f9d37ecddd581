"""The OpenAPI document, made from the routes and the structs they decode and encode."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import msgspec
from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler

from gateway.api.route import JSON, Route, route_of
from gateway.wire_out import ErrorResponse

HttpRequest = Request[Any, Any, Any]
REF = "#/components/schemas/{name}"

ERRORS = {
    400: "A field, parameter or header has a bad value, or is unknown; `param` names it",
    401: "No valid API key",
    403: "The key lacks the scope",
    404: "Unknown path, model or trace",
    405: "Wrong method",
    409: "A trace with this x-request-id exists, or what is there already does not allow it",
    413: "The body is too large",
    415: "The body is not application/json",
    429: "Too many requests; Retry-After says when to come again",
    431: "The headers are too large",
    500: "The gateway failed",
    503: "Loading, draining, or the tape is not open; Retry-After says when to come again",
    504: "The answer was not complete in time",
}
_PROMPT_FORMS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "array", "minItems": 1, "items": {"type": "string"}},
    {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
    {
        "type": "array",
        "minItems": 1,
        "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
    },
]


def document(handlers: Iterable[HTTPRouteHandler], model: str) -> dict[str, Any]:
    """OpenAPI 3.1 of these handlers, with the one model that is served."""
    handlers = list(handlers)
    routes = [route_of(handler.opt) for handler in handlers]
    structs = {kind for route in routes for kind in _structs(route)} | {ErrorResponse}
    ordered = sorted(structs, key=lambda kind: kind.__name__)
    _, components = msgspec.json.schema_components(ordered, ref_template=REF)
    if "CompletionRequest" in components:
        # msgspec cannot tell lists of one kind from mixed ones; the handler does.
        components["CompletionRequest"]["properties"]["prompt"] = {"anyOf": _PROMPT_FORMS}
    for schema in components.values():
        if schema.get("additionalProperties") is False and "model" in schema["properties"]:
            schema["properties"]["model"] = {"type": "string", "enum": [model]}
    paths: dict[str, dict[str, Any]] = {}
    for handler, route in zip(handlers, routes, strict=True):
        for path in handler.paths:
            shown, parameters = _path(path)
            for method in handler.http_methods:
                operation = _operation(handler, route, parameters)
                paths.setdefault(shown, {})[str(getattr(method, "value", method)).lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tokentape",
            "version": version("tokentape"),
            "description": "OpenAI-compatible completions by two models, every step of them on a tape.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _structs(route: Route) -> list[Any]:
    return [kind for kind in (route.body, route.returns, *route.also.values()) if _is_struct(kind)]


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _path(path: str) -> tuple[str, list[dict[str, Any]]]:
    """Litestar's `{name:type}` as OpenAPI's `{name}`, with its parameters."""
    parts, parameters = [], []
    for part in path.split("/"):
        if part.startswith("{"):
            name = part.strip("{}").partition(":")[0]
            parts.append(f"{{{name}}}")
            parameters.append(
                {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            )
        else:
            parts.append(part)
    return "/".join(parts), parameters


def _operation(handler: HTTPRouteHandler, route: Route, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    summary = (handler.fn.__doc__ or "").strip().splitlines()[0].rstrip(".")
    content = {JSON: route.returns} if route.returns is not None else {}
    operation: dict[str, Any] = {
        "operationId": handler.fn.__name__,
        "summary": summary,
        "parameters": [*parameters, *_query(route)],
        "responses": {
            str(route.status): {"description": "Success", "content": _content({**content, **route.also})},
            **{
                str(status): {"description": ERRORS[status], "content": _content({JSON: ErrorResponse})}
                for status in _errors(route)
            },
        },
    }
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _content({JSON: route.body})}
    if route.scope is not None:
        operation["security"] = [{"key": []}, {}]
        operation["description"] = f"Needs a key with the scope `{route.scope}` where keys are configured."
    return operation


def _errors(route: Route) -> list[int]:
    """The statuses that a route may end with."""
    found = {400, 404, 405, 431, 500, 503}
    if route.scope is not None:
        found |= {401, 403}
    if route.body is not None:
        found |= {413, 415}
    if route.infers:
        found |= {409, 429, 504}
    if route.conflicts:
        found.add(409)
    return sorted(found)


def _content(kinds: dict[str, Any]) -> dict[str, Any]:
    return {mime: {"schema": _schema(kind)} for mime, kind in kinds.items()}


def _schema(kind: Any) -> dict[str, Any]:
    if kind is None:
        return {"type": "string"}
    return {"$ref": REF.format(name=kind.__name__)} if _is_struct(kind) else msgspec.json.schema(kind)


def _query(route: Route) -> list[dict[str, Any]]:
    if route.query is None:
        return []
    (_,), components = msgspec.json.schema_components([route.query])
    schema = components[route.query.__name__]
    return [
        {"name": name, "in": "query", "required": False, "schema": _not_null(field)}
        for name, field in schema["properties"].items()
    ]


def _not_null(field: dict[str, Any]) -> dict[str, Any]:
    """A query parameter is absent or has a value; it cannot be null."""
    options = [option for option in field.get("anyOf", []) if option != {"type": "null"}]
    if not options:
        return field
    return options[0] if len(options) == 1 else {"anyOf": options}


@get("/openapi.json", opt=Route(None, returns=dict[str, Any]).opt)
async def openapi_json(request: HttpRequest) -> Response[bytes]:
    """This document."""
    body: bytes = request.app.state.openapi
    return Response(body, media_type=JSON)

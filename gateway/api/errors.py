"""The one error envelope, and every exception that becomes one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import structlog
from litestar import Request, Response
from litestar.exceptions import HTTPException

from gateway.wire import BodyError
from gateway.wire_out import ErrorBody, ErrorResponse

log = structlog.get_logger("gateway")

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A request that ends with an error status; headers go onto the response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def envelope(self) -> ErrorResponse:
        """The body of the answer."""
        return envelope(self.status, self.message, self.param, self.code)


def envelope(status: int, message: str, param: str | None = None, code: str | None = None) -> ErrorResponse:
    """The error body for a status; its type is OpenAI's for that status."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return ErrorResponse(ErrorBody(message=message, type=kind, param=param, code=code))


def unavailable(wait_s: float) -> ApiError:
    """503: the large model cannot be had, for wait_s seconds at least."""
    return ApiError(
        503,
        "The large model cannot be reached",
        code="large_model_unavailable",
        headers={"retry-after": str(max(1, math.ceil(wait_s)))},
    )


def error_response(error: ApiError) -> Response[bytes]:
    """The HTTP answer for an error."""
    return Response(
        msgspec.json.encode(error.envelope),
        status_code=error.status,
        headers=error.headers,
        media_type="application/json",
    )


def as_api_error(error: Exception) -> ApiError:
    """Any exception as the client sees it; an unforeseen one is a 500 that tells nothing of the inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BodyError):
        return ApiError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, HTTPException):
        return _from_litestar(error)
    return ApiError(500, "The gateway failed while serving this request", code="internal_error")


def on_exception(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Litestar's exception handler for everything."""
    shown = as_api_error(error)
    if shown.status >= 500 and not isinstance(error, ApiError):
        log.error("request_failed", path=request.url.path, exc_info=error)
    if shown.status == 404 and isinstance(error, HTTPException):
        shown.message = f"There is nothing at {request.method} {request.url.path}"
    return error_response(shown)


def _from_litestar(error: HTTPException) -> ApiError:
    status = error.status_code
    code = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}.get(status)
    headers = dict(error.headers or {})
    extra = error.extra if isinstance(error.extra, list) else []
    first = next((item for item in extra if isinstance(item, dict)), {})
    param = first.get("key")
    message = f"{param}: {first.get('message')}" if param else error.detail
    return ApiError(status, message, param=param, code=code, headers=headers)

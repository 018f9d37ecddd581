"""Reading a JSON body or the query."""

from __future__ import annotations

from typing import Any, TypeVar

from litestar import Request

from gateway.api.errors import ApiError
from gateway.wire import Body, decode, decode_query

B = TypeVar("B", bound=Body)


async def read_body(request: Request[Any, Any, Any], kind: type[B]) -> B:
    """The body as a struct; ApiError 415 for another content type, BodyError for a bad field."""
    # A web page can post without asking only in types other than this one.
    given = request.headers.get("content-type", "nothing")
    if given.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(
            415,
            f"The body must be sent as application/json, not {given[:100]}",
            param="content-type",
            code="unsupported_content_type",
        )
    return decode(await request.body(), kind)


def read_query(request: Request[Any, Any, Any], kind: type[B]) -> B:
    """The query parameters as a struct; BodyError for a bad or unknown one."""
    return decode_query(request.query_params.multi_items(), kind)

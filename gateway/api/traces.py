"""The traces on the tape: a page of them, one, its steps, and whether its decisions replay."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pyarrow as pa
from litestar import Request, Response, get
from litestar.params import FromPath

from gateway.access import Scope
from gateway.api.bodies import read_query
from gateway.api.errors import ApiError
from gateway.api.models import as_json
from gateway.api.route import Route
from gateway.api.service import Service, service_of
from gateway.wire import StepsQuery, TraceQuery
from gateway.wire_out import Columns, TraceList
from logs.reader import BadCursor, Reader, TraceFilter

HttpRequest = Request[Any, Any, Any]
SETTLE_S = 2.0
"""Longest wait for the last signals of a choice whose client has its answer."""
ARROW = "application/vnd.apache.arrow.stream"


@get("/v1/traces", opt=Route(Scope.READ, query=TraceQuery, returns=TraceList).opt)
async def list_traces(request: HttpRequest) -> Response[bytes]:
    """A page of summaries, newest first."""
    query = read_query(request, TraceQuery)
    reader = reader_of(service_of(request.app.state))
    filters = TraceFilter(
        arm=query.arm,
        finish_reason=query.finish_reason,
        since=query.since,
        until=query.until,
        q=query.q,
        min_guard_hits=query.min_guard_hits,
        max_acceptance=query.max_acceptance,
        gateway=query.gateway,
    )
    try:
        data, next_cursor = await asyncio.to_thread(reader.traces, query.limit, query.cursor, filters)
    except BadCursor as error:
        raise ApiError(400, f"cursor: {error}", param="cursor", code="invalid_value") from None
    return as_json(TraceList(data=data, next_cursor=next_cursor))


@get("/v1/traces/{trace_id:str}", opt=Route(Scope.READ, returns=dict[str, Any]).opt)
async def get_trace(request: HttpRequest, trace_id: FromPath[str]) -> Response[bytes]:
    """One summary."""
    return as_json(await summary(service_of(request.app.state), trace_id))


@get(
    "/v1/traces/{trace_id:str}/steps",
    opt=Route(Scope.READ, query=StepsQuery, returns=Columns, also={ARROW: None}).opt,
)
async def get_steps(request: HttpRequest, trace_id: FromPath[str]) -> Response[bytes]:
    """The steps of one choice at output positions from <= idx < to: columns, or an Arrow stream."""
    query = read_query(request, StepsQuery)
    service = service_of(request.app.state)
    reader = reader_of(service)
    found = await summary(service, trace_id)
    check_choice(found, query.choice)
    table = await asyncio.to_thread(reader.steps, trace_id, query.choice, query.start, query.stop)
    if ARROW in request.headers.get("accept", ""):
        return Response(_arrow_stream(table), media_type=ARROW)
    columns = {name: _json_values(table[name]) for name in table.column_names}
    return as_json(Columns(columns=columns))


def reader_of(service: Service) -> Reader:
    """A reader of the tape; ApiError 503 where there is none."""
    if service.recorder is None:
        raise ApiError(503, "The tape is not open", code="not_ready", headers={"retry-after": "5"})
    return service.recorder.reader()


async def summary(service: Service, trace_id: str) -> dict[str, Any]:
    """A trace's summary; ApiError 404 for an id that is not on the tape."""
    reader = reader_of(service)

    def read() -> dict[str, Any] | None:
        if service.engine is not None:
            service.engine.settle(SETTLE_S)
        return reader.trace(trace_id)

    found = await asyncio.to_thread(read)
    if found is None:
        raise no_trace(service, trace_id)
    return found


def no_trace(service: Service, trace_id: str) -> ApiError:
    """404; in a fleet the trace may still be open on another gateway, which its response named."""
    fleet = service.config.fleet
    elsewhere = (
        f" on this gateway ({fleet.name}). What another gateway answered (its response said which, in "
        f"x-tokentape-gateway) can be read there, and here about {2 * fleet.close_s:g} s after its end"
        if fleet.share is not None
        else ""
    )
    return ApiError(
        404, f"There is no trace {trace_id[:200]!r}{elsewhere}", param="id", code="trace_not_found"
    )


def check_choice(found: dict[str, Any], choice: int) -> None:
    """ApiError 404 for a choice that the trace of this summary does not have."""
    if choice >= found["num_choices"]:
        raise ApiError(
            404, f"choice: the trace has {found['num_choices']} choices", param="choice", code="not_found"
        )


def _json_values(column: pa.ChunkedArray) -> list[Any]:
    """A column as JSON values; bytes are base64."""
    values: list[Any] = column.to_pylist()
    if pa.types.is_binary(column.type):
        return [None if value is None else base64.b64encode(value).decode() for value in values]
    return values


def _arrow_stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())

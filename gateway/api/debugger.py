"""The replay debugger over one trace: what other settings would have done, run again from a token, compare,
take away as a file."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace
from typing import Any

import pyarrow as pa
from litestar import Request, Response, get, post
from litestar.params import FromPath

from gateway import diff as diffs
from gateway.access import Scope
from gateway.api.bodies import read_body, read_query
from gateway.api.errors import ApiError, unavailable
from gateway.api.forks import fork_request
from gateway.api.guard import caller
from gateway.api.inference import context_of
from gateway.api.live import Cancelled, Failed, Live, TooLate
from gateway.api.models import as_json
from gateway.api.plan import check_levels, overlaid
from gateway.api.route import Route
from gateway.api.service import Service, service_of
from gateway.api.traces import SETTLE_S, check_choice, reader_of, summary
from gateway.recorded import COLUMNS as REPLAY_COLUMNS
from gateway.replay import UnknownPolicy, recorded_policy
from gateway.whatif import what_if
from gateway.wire_debug import ChoiceQuery, DiffQuery, ExportQuery, ForkRequest, WhatIfRequest
from logs.export import export_trace
from logs.labels import labelled

HttpRequest = Request[Any, Any, Any]

MEDIA = {"jsonl": "application/x-ndjson", "parquet": "application/vnd.apache.parquet"}


@post(
    "/v1/traces/{trace_id:str}/what-if",
    status_code=200,
    opt=Route(Scope.READ, body=WhatIfRequest, query=ChoiceQuery, returns=dict[str, Any], conflicts=True).opt,
)
async def post_what_if(request: HttpRequest, trace_id: FromPath[str]) -> Response[bytes]:
    """The decisions that other routing keys would have taken on the recorded path."""
    service, query = service_of(request.app.state), read_query(request, ChoiceQuery)
    body = await read_body(request, WhatIfRequest)
    row, reader = await choice_of(service, trace_id, query.choice), reader_of(service)
    try:
        _, policy = overlaid(
            body.routing, row["policy_name"], recorded_policy(row["policy"]), service.policies
        )
    except UnknownPolicy as error:
        raise ApiError(409, str(error), code="unknown_policy") from None

    if row.get("middle_models"):
        raise ApiError(
            400,
            "what-if answers for two tiers: in this trace a middle tier decided as well; fork it instead",
            code="middle_tiers",
        )
    check_levels(policy, 0)

    def compute() -> Any:
        steps = reader.steps(trace_id, query.choice, columns=REPLAY_COLUMNS)
        return what_if(row, steps, policy, labelled(reader, policy).binned())

    return as_json(await asyncio.to_thread(compute))


@post(
    "/v1/traces/{trace_id:str}/fork",
    status_code=200,
    opt=Route(Scope.INFER, body=ForkRequest, query=ChoiceQuery, returns=dict[str, Any], infers=True).opt,
)
async def post_fork(request: HttpRequest, trace_id: FromPath[str]) -> Response[bytes]:
    """Run the models again from one output position; answers when the new trace is complete."""
    service, query = service_of(request.app.state), read_query(request, ChoiceQuery)
    body = await read_body(request, ForkRequest)
    engine = service.engine_or_503()
    row, reader = await choice_of(service, trace_id, query.choice), reader_of(service)
    parent = await asyncio.to_thread(reader.steps, trace_id, query.choice)
    forked = await asyncio.to_thread(fork_request, service, engine, row, parent, body)
    key = caller(request.scope["state"])
    live = Live(engine, (replace(forked, scope=key, context=context_of(request)),))
    service.start(live, key)
    num_tokens = 0
    try:
        server = service.config.server
        async for delta in live.deltas(server.keepalive_s, server.request_timeout_s):
            num_tokens += len(delta.steps) if delta is not None else 0
    except TooLate:
        raise ApiError(504, "The fork did not end in time", code="deadline_exceeded") from None
    except Cancelled:
        raise ApiError(503, "The gateway ended this fork: it is shutting down", code="aborted") from None
    except Failed as error:
        if error.retry_after_s is not None:
            raise unavailable(error.retry_after_s) from None
        raise ApiError(500, f"The engine failed on this fork: {error}", code="engine_error") from None
    finally:
        service.end(live, key, num_tokens)

    def compare() -> Any:
        engine.settle(SETTLE_S)
        return diffs.diff(parent, reader.steps(forked.id))

    found = await asyncio.to_thread(compare)
    return as_json(
        {
            "id": forked.id,
            "parent": trace_id,
            "forked_at": body.at,
            "first_divergence": found.first_divergence,
            "max_logprob_difference": found.max_logprob_difference,
            "logprob_difference_at": found.logprob_difference_at,
        }
    )


@get(
    "/v1/traces/{trace_id:str}/diff/{other_id:str}",
    opt=Route(Scope.READ, query=DiffQuery, returns=dict[str, Any]).opt,
)
async def get_diff(request: HttpRequest, trace_id: FromPath[str], other_id: FromPath[str]) -> Response[bytes]:
    """Two traces' written tokens side by side, and where they part."""
    service, query = service_of(request.app.state), read_query(request, DiffQuery)
    await choice_of(service, trace_id, query.choice)
    await choice_of(service, other_id, query.other_choice)
    reader = reader_of(service)

    def compare() -> Any:
        a: pa.Table = reader.steps(trace_id, query.choice, columns=diffs.COLUMNS)
        return diffs.diff(a, reader.steps(other_id, query.other_choice, columns=diffs.COLUMNS))

    return as_json(await asyncio.to_thread(compare))


@get(
    "/v1/traces/{trace_id:str}/export",
    opt=Route(Scope.READ, query=ExportQuery, also=dict.fromkeys(MEDIA.values())).opt,
)
async def get_export(request: HttpRequest, trace_id: FromPath[str]) -> Response[bytes]:
    """One trace as a file."""
    service, query = service_of(request.app.state), read_query(request, ExportQuery)
    await summary(service, trace_id)
    reader, file = reader_of(service), io.BytesIO()
    await asyncio.to_thread(export_trace, reader, trace_id, file, query.format)
    # The id may be a client's own, but its alphabet (A-Z a-z 0-9 . _ -) is safe in a header.
    name = f'attachment; filename="{trace_id}.{query.format}"'
    return Response(file.getvalue(), media_type=MEDIA[query.format], headers={"content-disposition": name})


async def choice_of(service: Service, trace_id: str, choice: int) -> dict[str, Any]:
    """The requests row of one choice; ApiError 404 for a trace or choice that is not on the tape."""
    check_choice(await summary(service, trace_id), choice)
    rows = await asyncio.to_thread(reader_of(service).choices, trace_id)
    return next(row for row in rows if row["choice"] == choice)

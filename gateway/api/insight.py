"""What many traces say: the threshold curve from labels, and why it is slow or worse than it was."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from litestar import Request, Response, get

from gateway.access import Scope
from gateway.api.bodies import read_query
from gateway.api.models import as_json
from gateway.api.route import Route
from gateway.api.service import Service, service_of
from gateway.api.traces import reader_of
from gateway.policy import Policy
from gateway.wire import BodyError
from gateway.wire_debug import FilterQuery
from logs.advisor import advise
from logs.diagnose import diagnose
from logs.reader import TraceFilter

HttpRequest = Request[Any, Any, Any]


@get("/v1/advisor", opt=Route(Scope.READ, query=FilterQuery, returns=dict[str, Any]).opt)
async def get_advice(request: HttpRequest) -> Response[bytes]:
    """Threshold -> kept share and agreement, from labelled steps of the traces that the query names.

    `current`: the threshold in force; `calibrated`: the one that the config's calibration holds for, or null.
    """
    service, query = service_of(request.app.state), read_query(request, FilterQuery)
    policy, reader = _policy(service, query), reader_of(service)
    advice = await asyncio.to_thread(advise, reader, policy, _filters(query))
    return as_json(asdict(advice) | {"calibrated": _calibrated(service, query.policy or "stable")})


@get("/v1/diagnose", opt=Route(Scope.READ, query=FilterQuery, returns=dict[str, Any]).opt)
async def get_diagnosis(request: HttpRequest) -> Response[bytes]:
    """The usual causes, each with its measured share and what would help, the most pressing first."""
    service, query = service_of(request.app.state), read_query(request, FilterQuery)
    policy, reader = _policy(service, query), reader_of(service)
    found = await asyncio.to_thread(diagnose, reader, policy, _filters(query))
    return as_json({"data": [asdict(finding) | {"noticed": finding.noticed} for finding in found]})


def _policy(service: Service, query: FilterQuery) -> Policy:
    if query.policy is None:
        return service.stable
    if query.policy not in service.policies:
        raise BodyError(f"policy: no policy is named {query.policy!r}", "policy", "invalid_value")
    return service.policies[query.policy]


def _calibrated(service: Service, name: str) -> float | None:
    """The threshold that calibration has shown for a policy of the config; None where it holds no more."""
    calibration, policy = service.config.calibration.get(name), service.policies.get(name)
    if calibration is None or policy is None or calibration.policy_hash != policy.hash:
        return None
    return policy.threshold


def _filters(query: FilterQuery) -> TraceFilter:
    return TraceFilter(
        arm=query.arm, finish_reason=query.finish_reason, since=query.since, until=query.until, q=query.q
    )

"""Canary rollouts, alerts, silences and webhook deliveries over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from litestar import Request, Response, delete, get, post
from litestar.params import FromPath

from alerts.service import AlertsService, ControlAway, FieldError, Follows, NotFound, WrongState
from gateway.access import Scope
from gateway.api.bodies import read_body
from gateway.api.errors import ApiError
from gateway.api.models import as_json
from gateway.api.route import Route
from gateway.api.service import Service, service_of
from gateway.wire_debug import RolloutRequest, SilenceRequest

HttpRequest = Request[Any, Any, Any]
T = TypeVar("T")
READ = Route(Scope.READ, returns=dict[str, Any]).opt
ADMIN = Route(Scope.ADMIN, returns=dict[str, Any], conflicts=True).opt


@post(
    "/v1/rollouts",
    status_code=201,
    opt=Route(Scope.ADMIN, body=RolloutRequest, returns=dict[str, Any], status=201, conflicts=True).opt,
)
async def start_rollout(request: HttpRequest) -> Response[bytes]:
    """Start a canary; the answer estimates how many requests its verdict will take."""
    alerts = _alerts(request)
    body = await read_body(request, RolloutRequest)
    return as_json(await _call(lambda: alerts.start_rollout(_given(body))), status=201)


@get("/v1/rollouts", opt=READ)
async def list_rollouts(request: HttpRequest) -> Response[bytes]:
    """Every rollout, newest first."""
    return as_json({"data": await _call(_alerts(request).rollouts)})


@get("/v1/rollouts/{name:str}", opt=READ)
async def get_rollout(request: HttpRequest, name: FromPath[str]) -> Response[bytes]:
    """One rollout: verdict, weight, units, evidence and history."""
    alerts = _alerts(request)
    return as_json(await _call(lambda: alerts.rollout(name)))


@post("/v1/rollouts/{name:str}/{action:str}", status_code=200, opt=ADMIN)
async def act_on_rollout(request: HttpRequest, name: FromPath[str], action: FromPath[str]) -> Response[bytes]:
    """Promote, abort, pause or resume."""
    alerts = _alerts(request)
    actions: dict[str, Callable[[str], Any]] = {
        "promote": alerts.promote,
        "abort": alerts.abort,
        "pause": alerts.pause,
        "resume": alerts.resume,
    }
    if action not in actions:
        raise ApiError(404, f"A rollout can be asked to {', '.join(actions)}", code="not_found")
    return as_json(await _call(lambda: actions[action](name)))


@get("/v1/alerts", opt=READ)
async def list_alerts(request: HttpRequest) -> Response[bytes]:
    """What fires, what is silenced, what was."""
    return as_json(await _call(_alerts(request).alerts))


@post(
    "/v1/alerts/silences",
    status_code=201,
    opt=Route(Scope.ADMIN, body=SilenceRequest, returns=dict[str, Any], status=201, conflicts=True).opt,
)
async def add_silence(request: HttpRequest) -> Response[bytes]:
    """Silence alerts by their labels for a while."""
    alerts = _alerts(request)
    body = await read_body(request, SilenceRequest)
    return as_json(await _call(lambda: alerts.add_silence(_given(body))), status=201)


@delete("/v1/alerts/silences/{silence_id:str}", status_code=200, opt=ADMIN)
async def delete_silence(request: HttpRequest, silence_id: FromPath[str]) -> Response[bytes]:
    """End a silence."""
    alerts = _alerts(request)
    await _call(lambda: alerts.delete_silence(silence_id))
    return as_json({"id": silence_id, "deleted": True})


@get("/v1/webhooks/deliveries", opt=READ)
async def list_deliveries(request: HttpRequest) -> Response[bytes]:
    """The newest deliveries and what came of them."""
    return as_json({"data": await _call(_alerts(request).deliveries)})


@post("/v1/webhooks/deliveries/{delivery_id:str}/redeliver", status_code=200, opt=ADMIN)
async def redeliver(request: HttpRequest, delivery_id: FromPath[str]) -> Response[bytes]:
    """Send a delivery once more, with the same webhook-id."""
    alerts = _alerts(request)
    return as_json(await _call(lambda: alerts.redeliver(delivery_id)))


def _alerts(request: HttpRequest) -> AlertsService:
    service: Service = service_of(request.app.state)
    if service.alerts is None:
        raise ApiError(503, "The gateway is still starting", code="not_ready", headers={"retry-after": "5"})
    return service.alerts


def _given(body: RolloutRequest | SilenceRequest) -> dict[str, Any]:
    """What the client sent, without what it left out."""
    given = msgspec.to_builtins(body)
    return {name: value for name, value in given.items() if value is not None}


async def _call(do: Callable[[], T]) -> T:
    """Run in a thread; what alerts/ refuses becomes an error of the API."""
    try:
        return await asyncio.to_thread(do)
    except FieldError as error:
        raise ApiError(400, str(error), param=error.param, code="invalid_value") from None
    except Follows as error:
        raise ApiError(409, str(error), code="not_control") from None
    except WrongState as error:
        raise ApiError(409, str(error), code="wrong_state") from None
    except ControlAway as error:
        retry = {"retry-after": "5"}
        raise ApiError(503, f"The control is away: {error}", code="control_away", headers=retry) from None
    except NotFound as error:
        raise ApiError(404, str(error), code="not_found") from None

"""What every handler shares: the engine, the tape, the policies, and who is being served right now."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from alerts.service import AlertsService
from gateway.access import Keyring
from gateway.api.errors import ApiError
from gateway.api.limits import Pace, Quota, too_many
from gateway.api.live import Engine, Live
from gateway.api.plan import Arm, Limits
from gateway.config import Config
from gateway.core import Finished
from gateway.engines.refusals import refusal
from gateway.grammar import Grammars
from gateway.metrics import Metrics
from gateway.policy import Policy
from gateway.request import Request
from gateway.wire import BodyError
from gateway.worker import QueueFull
from logs.recorder import Recorder

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
REMEMBERED_IDS = 10_000
"""Ids of ended requests kept in memory, so that a clash is seen before the tape has them."""


class Spans(Protocol):
    """What requests tell of themselves to OpenTelemetry."""

    def begin(self, requests: tuple[Request, ...]) -> tuple[Request, ...]: ...

    def end(self, request_id: str, ended: tuple[Finished, ...]) -> None: ...


@dataclass(slots=True)
class Service:
    """One gateway's state. engine is None until the models are loaded; recorder is None without a tape, and
    telemetry unless it is configured.
    """

    config: Config
    metrics: Metrics
    model_name: str
    keys: Keyring = field(default_factory=Keyring)
    alerts: AlertsService | None = None
    recorder: Recorder | None = None
    engine: Engine | None = None
    telemetry: Spans | None = None
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    running: dict[str, Live] = field(default_factory=dict)
    clock: Callable[[], float] = time.time
    policies: dict[str, Policy] = field(init=False)
    quota: Quota = field(init=False)
    pace: Pace = field(default_factory=Pace)
    num_exports: int = 0
    _grammars: Grammars | None = None
    _compiling: threading.Lock = field(default_factory=threading.Lock)
    _ended: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.policies = self.config.policies
        auth = self.config.auth
        self.quota = Quota(auth.max_concurrent, auth.tokens_per_minute, self.clock)

    @property
    def ready(self) -> bool:
        """Models loaded and the queue open."""
        return self.engine is not None and self.engine.ready and not self.draining

    @property
    def stable(self) -> Policy:
        """The policy in force: the config's, or the one a rollout promoted."""
        return self.policies["stable"] if self.alerts is None else self.alerts.stable

    def arm(self, request_id: str, user: str | None, header_user: str | None) -> Arm:
        """The arm and policy of a new request, before its own routing keys; users keep their arm."""
        if self.alerts is None:
            return Arm(name="stable", policy_name="stable", policy=self.stable)
        given = self.alerts.assign(request_id, user, header_user)
        return Arm(given.arm, given.policy_name, given.policy, given.user_hash)

    def engine_or_503(self) -> Engine:
        """The engine, or ApiError 503 while the models load or the gateway drains."""
        if self.engine is None or self.draining:
            why = "shutting down" if self.draining else "loading its models"
            raise ApiError(503, f"The gateway is {why}", code="not_ready", headers={"retry-after": "5"})
        return self.engine

    def limits(self, engine: Engine) -> Limits:
        """What one request may ask for."""
        return Limits(
            max_model_len=engine.max_model_len,
            max_choices=self.config.server.max_choices,
            num_middles=len(self.config.models.middle),
        )

    def grammars(self) -> Grammars:
        """The compiler of grammars; made at first use, so call it in a thread."""
        engine = self.engine_or_503()
        with self._compiling:
            if self._grammars is None:
                self._grammars = Grammars(engine.tokenizer, engine.vocab_size)
            return self._grammars

    def check_model(self, model: str) -> None:
        """ApiError 404 for a model that is not served."""
        if model != self.model_name:
            raise ApiError(
                404,
                f"The model {model!r} is not served here; {self.model_name!r} is",
                param="model",
                code="model_not_found",
            )

    def new_id(self, prefix: str) -> str:
        """A fresh trace id."""
        return f"{prefix}-{secrets.token_hex(12)}"

    def id_is_taken(self, request_id: str) -> bool:
        """Whether a trace of this id exists; may read the tape, so call it in a thread."""
        if request_id in self.running or request_id in self._ended:
            return True
        return self.recorder is not None and self.recorder.has(request_id)

    def start(self, live: Live, key: str = "") -> None:
        """Submit a key's request; ApiError 429 with Retry-After when there is no room, 409 for a taken id."""
        if live.id in self.running:
            raise clash(live.id)
        if self.config.remote.engine is not None:
            check_elsewhere(live.requests)
        engine = self.engine_or_503()
        wait_s = self.pace.expected_wait_s(engine.num_waiting, engine.num_running)
        if wait_s > self.config.server.max_wait_s:
            raise too_many(f"A slot would be free in about {wait_s:.0f} s", wait_s, "expected_wait")
        # Refused before any choice is handed over: one that was would be a trace, and its id taken.
        if engine.num_waiting + len(live.requests) > self.config.engine.max_queue:
            raise too_many("Too many requests are waiting", wait_s, "queue_full")
        self.quota.enter(key)
        self.running[live.id] = live
        if self.telemetry is not None:
            live.requests = self.telemetry.begin(live.requests)
        try:
            live.start()
        except BaseException as error:
            del self.running[live.id]
            self.quota.leave(key, 0)
            if self.telemetry is not None:
                self.telemetry.end(live.id, ())
            if isinstance(error, QueueFull):
                raise too_many("Too many requests are waiting", wait_s, "queue_full") from None
            raise

    def end(self, live: Live, key: str = "", num_tokens: int = 0) -> None:
        """The request has left: free what it still holds, book its tokens, remember its id."""
        live.cancel()
        if self.running.pop(live.id, None) is not None:
            self.quota.leave(key, num_tokens)
            if self.telemetry is not None:
                self.telemetry.end(live.id, tuple(live.ended))
        for finished in live.ended:
            self.pace.saw(finished.timings)
        self._ended[live.id] = None
        while len(self._ended) > REMEMBERED_IDS:
            self._ended.popitem(last=False)

    def forget_ended(self) -> None:
        """Leave the clash of ids to the tape alone, as after a restart."""
        self._ended.clear()


def check_elsewhere(requests: Iterable[Request]) -> None:
    """BodyError, naming the field, where a large model on an engine elsewhere cannot serve a request."""
    for request in requests:
        refused = refusal(request)
        if refused is not None:
            field, why = refused
            raise BodyError(
                f"{field}: the large model runs on an engine elsewhere; {why}", field, "unsupported_value"
            )


def clash(request_id: str) -> ApiError:
    """409: the client's x-request-id names a trace that exists; trying again cannot help."""
    return ApiError(
        409,
        f"x-request-id: a request with the id {request_id!r} exists",
        param="x-request-id",
        code="duplicate_request_id",
        headers={"x-should-retry": "false"},
    )


def service_of(state: Any) -> Service:
    """The Service on a Litestar app's state."""
    service: Service = state.service
    return service

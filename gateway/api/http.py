"""All routes as one ASGI application over a Service."""

from __future__ import annotations

from functools import cache

import msgspec
from litestar import Litestar
from litestar.config.cors import CORSConfig
from litestar.datastructures import State
from litestar.types import ASGIApp

from gateway.api import (
    debugger,
    docs,
    fleet,
    inference,
    insight,
    models,
    openapi,
    operations,
    opinions,
    replays,
    rollouts,
    tape,
    traces,
)
from gateway.api.errors import on_exception
from gateway.api.front import Front
from gateway.api.guard import check_key
from gateway.api.service import Service

HANDLERS = (
    inference.completions,
    inference.chat_completions,
    models.list_models,
    models.get_model,
    models.tokenize,
    models.detokenize,
    models.tokenizer_info,
    operations.health,
    operations.ready,
    operations.metrics,
    traces.list_traces,
    traces.get_trace,
    traces.get_steps,
    replays.replay_all,
    replays.replay_one,
    debugger.post_what_if,
    debugger.post_fork,
    debugger.get_diff,
    debugger.get_export,
    insight.get_advice,
    insight.get_diagnosis,
    opinions.post_score,
    opinions.post_review,
    opinions.get_sample,
    tape.get_stats,
    tape.compact_tape,
    tape.recover_tape,
    tape.export_tape,
    fleet.get_fleet,
    rollouts.start_rollout,
    rollouts.list_rollouts,
    rollouts.get_rollout,
    rollouts.act_on_rollout,
    rollouts.list_alerts,
    rollouts.add_silence,
    rollouts.delete_silence,
    rollouts.list_deliveries,
    rollouts.redeliver,
    openapi.openapi_json,
    docs.docs,
    docs.root,
)


def build_http(service: Service) -> ASGIApp:
    """The gateway's HTTP application."""
    server = service.config.server
    schema, page = described(service.model_name)
    app = Litestar(
        route_handlers=HANDLERS,
        exception_handlers={Exception: on_exception},
        guards=[check_key],
        cors_config=CORSConfig(allow_origins=server.cors_origins) if server.cors_origins else None,
        state=State({"service": service, "openapi": schema, "docs": page}),
        openapi_config=None,
        logging_config=None,
        request_max_body_size=int(server.max_body_mib * 2**20),
        debug=False,
    )
    return Front(app, service)


@cache
def described(model: str) -> tuple[bytes, str]:
    """The routes over a model so named: the OpenAPI document and its page, worked out once."""
    schema = openapi.document(HANDLERS, model)
    return msgspec.json.encode(schema), docs.page(schema)

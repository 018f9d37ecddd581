"""A fork as an engine request: the recorded request planned again, with the recorded tokens given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import pyarrow as pa

from gateway.api.errors import ApiError
from gateway.api.live import Engine
from gateway.api.plan import Arm, Origin, check_levels, overlaid, plan_completion
from gateway.api.plan_chat import plan_chat
from gateway.api.service import Service
from gateway.api.tools import constraint_of
from gateway.core import UNWRITTEN, Outcome, Tier
from gateway.replay import UnknownPolicy, recorded_policy
from gateway.request import Request
from gateway.wire import BodyError, CompletionRequest
from gateway.wire_chat import ChatRequest
from gateway.wire_debug import ForkRequest

CHAT = "/v1/chat/completions"


def fork_request(
    service: Service, engine: Engine, row: Mapping[str, Any], steps: pa.Table, body: ForkRequest
) -> Request:
    """The request of a fork of one choice; may compile a grammar, so call it in a thread.

    Raises BodyError naming the field, ApiError 409 where the tape does not hold what is needed.
    """
    recorded = _recorded(service, engine, row)
    tokens = _written(steps)
    if body.at > len(tokens):
        raise BodyError(f"at: the answer has {len(tokens)} tokens", "at", "invalid_value")
    if body.at >= recorded.sampling.max_tokens:
        raise BodyError(f"at: max_tokens was {recorded.sampling.max_tokens}", "at", "invalid_value")
    forced = tokens[: body.at]
    if body.token_id is not None:
        if body.token_id >= engine.tokenizer.vocab_size:
            raise BodyError(
                f"token_id: the vocabulary has {engine.tokenizer.vocab_size} tokens",
                "token_id",
                "invalid_value",
            )
        forced = [*forced, (body.token_id, Tier.LARGE)]
    name, policy = recorded.policy_name, recorded.policy
    if body.routing is not None:
        name, policy = overlaid(body.routing, name, policy, service.policies)
        check_levels(policy, service.limits(engine).num_middles)
    return replace(
        recorded,
        id=service.new_id("fork"),
        choice=0,
        policy=policy,
        policy_name=name,
        received=service.clock(),
        noise_choice=row["choice"],
        parent=row["request_id"],
        forked_at=body.at,
        audited=True,
        forced=tuple(forced),
    )


def _recorded(service: Service, engine: Engine, row: Mapping[str, Any]) -> Request:
    """The parent as it was planned, from the client's own body on the tape."""
    prompt = row.get("prompt_ids")
    if not prompt or not row.get("params"):
        raise ApiError(409, "The tape does not hold this trace's prompt (capture level)", code="no_prompt")
    try:
        policy = recorded_policy(row["policy"])
    except UnknownPolicy as error:
        raise ApiError(409, str(error), code="unknown_policy") from None
    arm = Arm(name=row["arm"], policy_name=row["policy_name"], policy=policy)
    origin = Origin(id=row["request_id"], endpoint=row["endpoint"], received=service.clock())
    limits = service.limits(engine)
    # The recorded policy already holds the request's own routing keys.
    params = {
        name: value for name, value in row["params"].items() if name not in ("routing", "stream_options")
    }
    params |= {"stream": False, "seed": row["seed"], "n": 1}
    params.pop("best_of", None)
    if row["endpoint"] == CHAT:
        chat = msgspec.convert(params, ChatRequest)
        constraint = constraint_of(chat, service.grammars())
        (planned,) = plan_chat(chat, origin, arm, service.policies, engine.tokenizer, limits, constraint)
    else:
        completion = msgspec.convert(params | {"prompt": prompt}, CompletionRequest)
        (planned,) = plan_completion(completion, origin, arm, service.policies, engine.tokenizer, limits)
    return replace(planned, policy=policy, prompt_ids=tuple(prompt), params=row["params"])


def _written(steps: pa.Table) -> list[tuple[int, Tier]]:
    """The output as (token id, who wrote it), in order; ApiError 409 without token ids on the tape."""
    columns = steps.select(["idx", "token_id", "tier", "outcome"]).to_pylist()
    rows = sorted(
        (row for row in columns if Outcome(row["outcome"]) not in UNWRITTEN), key=lambda row: row["idx"]
    )
    if any(row["token_id"] is None for row in rows):
        raise ApiError(409, "The tape does not hold this trace's tokens (capture level)", code="no_tokens")
    return [(row["token_id"], Tier(row["tier"])) for row in rows]

"""A request as the engine takes it, and as the tape keeps it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gateway.core import AuditStatus, Finished, Kind, Sampling, Tier
from gateway.policy import Policy
from gateway.trace_context import TraceContext

if TYPE_CHECKING:
    # It imports torch, which readers of requests (the tape, alerts) do without.
    from gateway.sampling import Constraint


@dataclass(frozen=True, slots=True)
class Request:
    """One choice to decode. A client's request with n choices or several prompts is several of these
    with the same id and `choice` 0, 1, 2, ...

    prompt_ids: at least one token. policy: resolved, overrides applied. params: the client's own body
    fields, as received, for the tape. num_topk: how many top tokens of each model a step carries (>= 2).
    kind: what sort of answer the prompt asks for. keep_hidden: whether steps carry the small model's hidden
    states even where the policy reads none.
    audited: whether unverified tokens are shown to the large model after the answer is sent.
    scope: whose earlier prompts and answers may be reused for this request (a hash of the API key).
    constraint: makes the matcher of a grammar that every token must follow; one matcher a row.
    prompt_logprobs: whether the client wants the large model's view of the prompt; the first output token
    must then be the large model's (policy: mode not small_only, protect_first >= 1).
    user_hash: names the sticky key to the evidence of the running rollout; None without either.
    context: W3C trace context that calls made for this request carry.
    forced: given output tokens of a fork and the tier that wrote each in its parent. noise_choice: the choice
    whose noise is drawn: its parent's number for a fork, else its own.
    """

    id: str
    choice: int
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    policy: Policy
    policy_name: str
    received: float
    arm: str = "stable"
    endpoint: str = ""
    model: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    num_topk: int = 5
    kind: Kind = Kind.OTHER
    keep_hidden: bool = False
    parent: str | None = None
    forked_at: int | None = None
    audited: bool = False
    forced: tuple[tuple[int, Tier], ...] = ()
    noise_choice: int | None = None
    scope: str = ""
    prompt_logprobs: bool = False
    constraint: Callable[[], Constraint] | None = None
    user_hash: str | None = None
    context: TraceContext | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """What serves a request, written on every row of the tape's `requests` table.

    numerics: device, dtype and quantization of each model, such as "cpu/float32/none". middle_models,
    middle_hashes: of the tiers in between, weakest first.
    """

    small_model: str
    large_model: str
    small_hash: str
    large_hash: str
    numerics: str
    version: str
    router_hash: str | None = None
    middle_models: tuple[str, ...] = ()
    middle_hashes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """A row of the tape's `requests` table: at admission `finished` is None, at the end it is not."""

    request: Request
    served: Served
    finished: Finished | None = None
    audit: AuditStatus = AuditStatus.NOT_CHOSEN

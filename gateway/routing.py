"""What a client or a config file may say about routing: the contract's `routing` keys, checked, and
how they are laid over a policy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.core import MIDDLES, Accept, Kind, Mode
from gateway.policy import Level, Policy
from gateway.router import Router

Share = Annotated[float, Meta(ge=0.0, le=1.0)]
DraftLength = Annotated[int, Meta(ge=1, le=32)]


class LevelKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a middle tier does differently: `[policy.<name>.middle]`, or `middle` in a request's `routing`."""

    threshold: Annotated[
        Share | None, Meta(description="routing score, of its own signals, from which it lets a token stand")
    ] = None
    draft_length: Annotated[
        DraftLength | None, Meta(description="most of its tokens that wait for the next tier")
    ] = None


def _level(number: str) -> Meta:
    return Meta(
        description=f"what the {number} middle tier does differently: a table with `threshold` and "
        "`draft_length`"
    )


class PolicyKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The keys that a request's `routing` object and a `[policy.<name>]` table have in common."""

    mode: Annotated[
        Mode | None,
        Meta(
            description="who may write: `routed`, `large_only`, `small_only`; `shadow`: the large model "
            "alone writes, and what routing would have done is recorded"
        ),
    ] = None
    accept: Annotated[
        Accept | None,
        Meta(
            description="what the large model must say of a drafted token: "
            + ", ".join(f"`{accept}`" for accept in Accept)
        ),
    ] = None
    threshold: Annotated[
        Share | None, Meta(description="routing score from which the small model keeps its token")
    ] = None
    accept_threshold: Annotated[
        Share | None, Meta(description="for `accept = threshold`: least probability under the large model")
    ] = None
    alpha: Annotated[
        Share | None,
        Meta(description="for `accept = token_v3`: keep while p >= (1 - alpha) times the large model's best"),
    ] = None
    draft_length: Annotated[DraftLength | None, Meta(description="most drafted tokens per verification")] = (
        None
    )
    protect_first: Annotated[
        Annotated[int, Meta(ge=0, le=1_000_000)] | None,
        Meta(description="the first N output tokens come from the large model"),
    ] = None
    max_small_run: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | None,
        Meta(description="most consecutive tokens not written by the large model"),
    ] = None
    small_repetition_penalty: Annotated[
        Annotated[float, Meta(ge=0.01, le=100.0)] | None,
        Meta(description="repetition penalty on the small model's proposals only"),
    ] = None
    lookup: Annotated[
        bool | None, Meta(description="whether prompt lookup (n-gram) may draft tokens for nothing")
    ] = None
    large_token_budget: Annotated[
        Annotated[int, Meta(ge=0, le=1_000_000_000)] | None,
        Meta(description="most tokens the large model may write, at least `protect_first`; not with `exact`"),
    ] = None
    audit_rate: Annotated[
        Share | None,
        Meta(description="share of requests whose unverified tokens are audited after the answer is sent"),
    ] = None
    middle: Annotated[LevelKeys | None, _level("first")] = None
    middle2: Annotated[LevelKeys | None, _level("second")] = None
    middle3: Annotated[LevelKeys | None, _level("third")] = None


class Routing(PolicyKeys, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The body field `routing` of one request."""

    policy: Annotated[
        Annotated[str, Meta(min_length=1, max_length=128)] | None,
        Meta(description="a `[policy.<name>]` of the config; the other keys override it"),
    ] = None


class PolicyTable(PolicyKeys, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A `[policy.<name>]` table of the config file: every field of `gateway.policy.Policy`."""

    probe_rate: Annotated[
        Share | None, Meta(description="share of kept decisions deferred at random, to get labels")
    ] = None
    bias: Annotated[float | None, Meta(description="score: constant term")] = None
    gap_weight: Annotated[
        float | None, Meta(description="score: weight of the gap between the two most likely tokens")
    ] = None
    entropy_weight: Annotated[float | None, Meta(description="score: weight of the entropy in nats")] = None
    run_weight: Annotated[
        float | None, Meta(description="score: weight of the run length over `max_small_run`")
    ] = None
    acceptance_weight: Annotated[
        float | None, Meta(description="score: weight of the running acceptance")
    ] = None
    attn_entropy_weight: Annotated[
        float | None, Meta(description="score: weight of the last layer's mean attention entropy in nats")
    ] = None
    position_weight: Annotated[
        float | None, Meta(description="score: weight of the output position over 256, at most 1")
    ] = None
    router: Annotated[
        Router | None,
        Meta(
            description="safetensors file of a learned router, relative to the config file; its "
            "P(large agrees) is the score instead of the weighted sum"
        ),
    ] = None
    fact_guard: Annotated[
        bool | None,
        Meta(description="whether proposals that look like numbers, quotations or names are deferred"),
    ] = None
    large_below: Annotated[
        Annotated[int, Meta(ge=0, le=1_000_000)] | None,
        Meta(
            description="requests that allow fewer output tokens than this are the large model's alone, "
            "unless they name their `mode`; 0: none"
        ),
    ] = None
    large_kinds: Annotated[
        tuple[Kind, ...] | None,
        Meta(
            description="kinds of prompts that are the large model's alone, unless the request names its "
            "`mode`: " + ", ".join(f"`{kind}`" for kind in Kind)
        ),
    ] = None
    loop_ngram: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        Meta(description="loop guard: length in tokens of the n-gram that is watched"),
    ] = None
    loop_limit: Annotated[
        Annotated[int, Meta(ge=0, le=1_000_000)] | None,
        Meta(description="loop guard: repeats of an n-gram before the large model decides; 0 turns it off"),
    ] = None


class PolicyConflict(ValueError):
    """Keys that exclude each other; key is the one to change."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key


def overlay(policy: Policy, keys: PolicyKeys) -> Policy:
    """The policy with every key that is set laid over it; raises PolicyConflict."""
    given = {
        name: value
        for name in keys.__struct_fields__
        if name != "policy" and (value := getattr(keys, name)) is not None
    }
    for name in MIDDLES:
        if name in given:
            before: Level = getattr(policy, name) or Level()
            changed = {k: v for k, v in msgspec.structs.asdict(given[name]).items() if v is not None}
            given[name] = replace(before, **changed)
    result = replace(policy, **given)
    budget = result.large_token_budget
    if budget is not None and result.accept is Accept.EXACT:
        raise PolicyConflict("large_token_budget", "`exact` leaves no token to the small model alone")
    if budget is not None and budget < result.protect_first:
        raise PolicyConflict("large_token_budget", f"less than protect_first = {result.protect_first}")
    return result

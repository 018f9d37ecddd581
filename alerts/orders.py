"""What a control tells the gateways that follow it: the policy in force, and who gets the canary's."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.policy import Policy, settings
from gateway.router import Router
from gateway.routing import PolicyTable, overlay

_Name = Annotated[str, Meta(min_length=1, max_length=128)]


@dataclass(frozen=True, slots=True)
class Split:
    """Who is on the canary: salt and weight of `rollout.arm_of`, the rollout's name, the policy there."""

    salt: str
    weight: float
    name: str
    policy: Policy


class _Canary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: _Name
    salt: _Name
    weight: Annotated[float, Meta(ge=0.0, le=1.0)]
    policy: dict[str, Any]


class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    control: _Name
    stable: dict[str, Any]
    canary: _Canary | None


class BadOrders(ValueError):
    """An answer that is none of a control; the message says why."""


@dataclass(frozen=True)
class Orders:
    """The arms in force, as one immutable thing. control: the name of who says so."""

    control: str
    stable: Policy
    split: Split | None = None

    @cached_property
    def body(self) -> bytes:
        """As JSON, the answer of `GET /v1/fleet`."""
        split = self.split
        canary = None
        if split is not None:
            canary = _Canary(
                name=split.name, salt=split.salt, weight=split.weight, policy=settings(split.policy)
            )
        return msgspec.json.encode(_Body(control=self.control, stable=settings(self.stable), canary=canary))

    @cached_property
    def etag(self) -> str:
        """Equal orders, equal ETag."""
        return f'"{hashlib.sha256(self.body).hexdigest()[:32]}"'

    @classmethod
    def read(cls, body: bytes) -> Orders:
        """What a control answered, every field checked; raises BadOrders."""
        try:
            given = msgspec.json.decode(body, type=_Body)
            canary = given.canary
            split = None
            if canary is not None:
                split = Split(canary.salt, canary.weight, canary.name, _policy(canary.policy))
            return cls(given.control, _policy(given.stable), split)
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            raise BadOrders((str(error).splitlines() or [type(error).__name__])[0]) from None


def _policy(fields: Mapping[str, Any]) -> Policy:
    """A policy out of `settings`, in the ranges of the config file."""
    given = {name: value for name, value in fields.items() if value is not None}
    if "router" in given:
        given["router"] = Router.of(given["router"])
    return overlay(Policy(), msgspec.convert(given, PolicyTable))

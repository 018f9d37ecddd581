"""What a route is for and what goes in and out, said once on its handler: the guard, the schema and the
documentation read it from there."""

from __future__ import annotations

from typing import Any

from gateway.access import Scope

JSON = "application/json"
ROUTE = "route"


class Route:
    """scope: whose keys may call; None: everybody, no key needed. body, query: structs. returns: a struct or
    other type.

    also: other content types of a 200 answer with their structs, or None for text and bytes.
    status: of success. infers: whether it runs the models, and so may end with 409, 429 or 504.
    conflicts: whether what is there already may forbid it: 409.
    """

    def __init__(
        self,
        scope: Scope | None,
        *,
        returns: Any = None,
        body: type | None = None,
        query: type | None = None,
        also: dict[str, Any] | None = None,
        status: int = 200,
        infers: bool = False,
        conflicts: bool = False,
    ) -> None:
        self.scope = scope
        self.returns = returns
        self.body = body
        self.query = query
        self.also = also or {}
        self.status = status
        self.infers = infers
        self.conflicts = conflicts

    @property
    def opt(self) -> dict[str, Any]:
        """The handler's `opt`."""
        return {ROUTE: self}


def route_of(opt: dict[str, Any]) -> Route:
    """The Route of a handler; a handler without one is for admins and undocumented."""
    route: Route = opt.get(ROUTE) or Route(Scope.ADMIN)
    return route

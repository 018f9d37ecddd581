"""Cache affinity: all calls for one conversation reach the replica that has its prefix in the KV cache.

Behind a router a header does it; over a list of replicas, rendezvous hashing (Thaler and Ravishankar 1998): a
replica that goes moves only its own keys, one that comes takes an even share from all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from gateway.request import Request

HEADERS = ("x-session-id", "x-smg-routing-key")
"""What routers read. vLLM's router (`consistent_hash`) takes `X-Session-ID` before all others, as does vLLM's
production stack with `--session-key x-session-id`; sglang-router, now SMG (`consistent_hashing`, `manual`),
takes `X-SMG-Routing-Key`."""


def affinity_key(request: Request) -> str:
    """What stays on one replica, as 32 hex digits: the client's `prompt_cache_key`, else its `user`, else the
    request, all of whose choices have the prompt in common. A fork stays where its parent was.
    """
    given = (request.params.get("prompt_cache_key"), request.params.get("user"), request.parent, request.id)
    key = next(str(value) for value in given if value)
    return hashlib.blake2b(f"{request.scope}:{key}".encode("utf-8", "replace"), digest_size=16).hexdigest()


def affinity_headers(request: Request) -> dict[str, str]:
    """The headers of every call that the large model's engine gets for a row."""
    return dict.fromkeys(HEADERS, affinity_key(request))


def replica_of(key: str, replicas: Sequence[str]) -> str:
    """The replica, out of at least one, whose hash with the key is highest."""
    return max(replicas, key=lambda url: hashlib.blake2b(f"{key} {url}".encode(), digest_size=8).digest())

"""Cache affinity: all calls for one conversation reach the replica that has its prefix in the KV cache.

The key goes into a header that the router before the replicas hashes. vLLM's router (`consistent_hash`) takes
`X-Session-ID` before all others, as does vLLM's production stack with `--session-key x-session-id`;
sglang-router, now SMG (`consistent_hashing`, `manual`), takes `X-SMG-Routing-Key`.
"""

from __future__ import annotations

import hashlib

from gateway.request import Request


def affinity_key(request: Request) -> str:
    """What stays on one replica, as 32 hex digits: the client's `prompt_cache_key`, else its `user`, else the
    request, all of whose choices have the prompt in common. A fork stays where its parent was.
    """
    given = (request.params.get("prompt_cache_key"), request.params.get("user"), request.parent, request.id)
    key = next(str(value) for value in given if value)
    return hashlib.blake2b(f"{request.scope}:{key}".encode("utf-8", "replace"), digest_size=16).hexdigest()

"""Which calls reach the same replica."""

from __future__ import annotations

from tape_fakes import request

from gateway.affinity import affinity_key


def test_who_shares_a_replica() -> None:
    key = affinity_key
    assert key(request("a", params={})) == key(request("a", choice=3, params={}))
    assert key(request("b", parent="a", params={})) == key(request("a", params={}))
    assert key(request("a", params={"user": "u"})) == key(request("b", params={"user": "u"}))
    assert key(request("a", params={"user": "u", "prompt_cache_key": "p"})) == key(
        request("b", params={"prompt_cache_key": "p"})
    )
    assert key(request("a", params={"user": "u"}, scope="k1")) != key(request("a", params={"user": "u"}))
    # Whatever a client writes there, it is a header's value.
    hostile = key(request("a", params={"user": "\u00fcser\r\nx: y\ud800"}))
    assert hostile.isalnum()
    assert len(hostile) == 32

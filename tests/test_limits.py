from __future__ import annotations

import pytest
from fakes import Clock
from hypothesis import given
from hypothesis import strategies as st
from serving import TINY, fake_gateway

from gateway.access import Key, Keyring, Scope, digest_of
from gateway.api.errors import ApiError
from gateway.api.limits import Pace, Quota
from gateway.config import AuthConfig, Config, ServerConfig
from gateway.core import Timings

COMPLETION = {"model": "tiny", "prompt": "hi", "max_tokens": 3}


def refusal(quota: Quota, key: str) -> tuple[str | None, int]:
    """The code and the Retry-After of a refused request."""
    with pytest.raises(ApiError) as caught:
        quota.enter(key)
    assert caught.value.status == 429
    return caught.value.code, int(caught.value.headers["retry-after"])


def test_concurrency_is_per_key() -> None:
    quota = Quota(2, None, Clock())
    quota.enter("a")
    quota.enter("a")
    quota.enter("b")
    assert refusal(quota, "a") == ("concurrency_limit", 1)
    quota.leave("a", 5)
    quota.enter("a")


def test_tokens_are_refilled_over_the_minute() -> None:
    clock = Clock()
    quota = Quota(None, 60, clock)
    quota.enter("a")
    quota.leave("a", 75)
    assert refusal(quota, "a") == ("token_rate_limit", 15)
    quota.enter("b")
    clock.now += 14
    assert refusal(quota, "a") == ("token_rate_limit", 1)
    clock.now += 2
    quota.enter("a")


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0, 30)), max_size=40))
def test_no_key_uses_more_than_its_rate(spendings: list[tuple[int, float]]) -> None:
    clock = Clock()
    began, used, last = clock.now, 0, 0
    quota = Quota(None, 600, clock)
    for tokens, pause in spendings:
        clock.now += pause
        try:
            quota.enter("a")
        except ApiError:
            continue
        quota.leave("a", tokens)
        used, last = used + tokens, tokens
    # One bucket, what flowed in since, and the last request, which is booked when it is over.
    assert used <= 600 + (clock.now - began) * 10 + last + 1e-6


def held(seconds: float) -> Timings:
    return Timings(received=0.0, admitted=10.0, first_token=10.0, finished=10.0 + seconds)


def test_the_expected_wait_follows_littles_law() -> None:
    pace = Pace()
    assert pace.expected_wait_s(5, 4) == 0.0, "nothing is known yet"
    pace.saw(held(8.0))
    assert pace.expected_wait_s(0, 4) == 0.0
    assert pace.expected_wait_s(3, 4) == 8.0
    assert pace.expected_wait_s(3, 0) == 32.0


def test_the_wait_is_forgotten_slowly() -> None:
    pace = Pace()
    pace.saw(held(8.0))
    for _ in range(60):
        pace.saw(held(2.0))
    assert pace.held_s == pytest.approx(2.0, rel=0.02)


def test_a_long_expected_wait_is_429_at_once() -> None:
    with fake_gateway(Config(models=TINY.models, server=ServerConfig(max_wait_s=10))) as gateway:
        gateway.service.pace.saw(held(30.0))
        assert gateway.post("/v1/completions", COMPLETION).status_code == 200
        gateway.service.pace.held_s = 30.0
        gateway.worker.num_waiting = 1
        response = gateway.post("/v1/completions", COMPLETION)
        assert (response.status_code, response.headers["retry-after"]) == (429, "60")
        assert response.json()["error"]["code"] == "expected_wait"


def test_limits_over_http() -> None:
    clock = Clock()
    auth = AuthConfig(max_concurrent=1, tokens_per_minute=7)
    keys = Keyring(Key(name, digest_of(name), frozenset(Scope)) for name in ("a", "b"))
    with fake_gateway(Config(models=TINY.models, auth=auth), keys=keys, clock=clock) as gateway:

        def code(who: str) -> str:
            headers = {"authorization": f"Bearer {who}"}
            response = gateway.post("/v1/completions", COMPLETION, headers=headers)
            return str(response.json().get("error", {}).get("code", "fine"))

        # Two prompt and three output tokens each.
        assert [code("a"), code("a"), code("a"), code("b")] == ["fine", "fine", "token_rate_limit", "fine"]
        clock.now += 60
        gateway.worker.hold = True
        body = {**COMPLETION, "stream": True}
        with gateway.http.stream("POST", "/v1/completions", json=body, headers={"authorization": "Bearer a"}):
            assert code("a") == "concurrency_limit"
            gateway.worker.advance(3)

"""Failures, limits and keys as the real `openai` client meets them, on the real engine over `tiny`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import openai
import pytest
from openai_gateway import MESSAGES, Gateway, serve_tiny
from serving import TINY

from gateway.access import Key, Keyring, Scope, digest_of
from gateway.config import AuthConfig, EngineConfig, ServerConfig

if TYPE_CHECKING:
    from tiny_pair import TinyPair

LONG: Any = {"model": "tiny", "prompt": "Hello", "max_tokens": 200, "extra_body": {"ignore_eos": True}}
SHORT: Any = {"model": "tiny", "prompt": "Hello", "max_tokens": 2}
TOOL: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def running(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with serve_tiny(tiny_pair, tmp_path_factory.mktemp("tape")) as gateway:
        yield gateway


@pytest.fixture
def gateway(running: Gateway) -> Iterator[Gateway]:
    """The gateway; when a test is over, nothing may stay behind."""
    yield running
    running.large.open.set()
    running.wait_until_idle()
    assert running.worker.kv_usage == 0


@pytest.fixture(scope="module")
def url(running: Gateway) -> Iterator[str]:
    with running.serving() as url:
        yield url


@pytest.fixture
def client(url: str, gateway: Gateway) -> Iterator[openai.OpenAI]:
    with client_of(url) as client:
        yield client


def client_of(url: str, key: str = "-") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def code(error: openai.APIError) -> tuple[str | None, str | None]:
    return error.code, error.type


@pytest.mark.parametrize(
    ("body", "kind", "param", "words"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "model", ("gpt-4", "tiny")),
        ({"prompt": "a" * 300}, openai.BadRequestError, "prompt", ("300", "256")),
        ({"prompt": [1, 5000]}, openai.BadRequestError, "prompt", ("5000", "259")),
        ({"prompt": []}, openai.BadRequestError, "prompt", ()),
        ({"logit_bias": {"5000": 1}}, openai.BadRequestError, "logit_bias", ("5000", "259")),
        ({"n": 129}, openai.BadRequestError, "n", ("129", "128")),
        ({"suffix": "end"}, openai.BadRequestError, "suffix", ()),
        ({"extra_body": {"stop_token_ids": [5000]}}, openai.BadRequestError, "stop_token_ids", ("5000",)),
        ({"extra_body": {"routing": {"large_token_budget": 3}}}, openai.BadRequestError, "routing", ()),
    ],
)
def test_a_refusal_names_its_field(
    client: openai.OpenAI, body: dict[str, Any], kind: Any, param: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(kind) as caught:
        client.completions.create(**{**SHORT, **body})
    assert str(caught.value.param).split(".")[0] == param
    assert all(word in caught.value.message for word in words)
    assert caught.value.type is not None


def test_tools_need_a_template_that_shows_them(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, tools=[TOOL])
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("method", "path", "content", "headers", "status"),
    [
        ("post", "/nowhere", b"{}", {}, 404),
        ("get", "/completions", b"", {}, 405),
        ("post", "/completions", b"{", {}, 400),
        ("post", "/completions", b"{}", {"content-type": "text/plain"}, 415),
        ("post", "/completions", b" " * (9 << 20), {}, 413),
        ("get", "/models", b"", {"x-long": "a" * 40_000}, 431),
    ],
)
def test_one_envelope_whatever_is_wrong(
    client: openai.OpenAI, method: str, path: str, content: bytes, headers: dict[str, str], status: int
) -> None:
    options: Any = {"headers": {"content-type": "application/json", **headers}}
    more: Any = {"content": content} if method == "post" else {}
    with pytest.raises(openai.APIStatusError) as caught:
        getattr(client, method)(path, cast_to=object, options=options, **more)
    assert caught.value.status_code == status
    assert set(caught.value.response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("chat", [False, True])
def test_a_failure_in_mid_stream_is_an_error_event(
    client: openai.OpenAI, gateway: Gateway, chat: bool
) -> None:
    gateway.large.fail_in = 5
    headers = {"x-request-id": f"broken-{chat}"}
    stream: Any = (
        client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, extra_headers=headers)
        if chat
        else client.completions.create(**LONG, stream=True, extra_headers=headers)
    )
    texts = (c.choices[0].delta.content or "" if chat else c.choices[0].text for c in stream)
    assert "".join(next(texts) for _ in range(2)), "the failure was not in mid-stream"
    with pytest.raises(openai.APIError) as caught:
        list(texts)
    assert code(caught.value) == ("engine_error", "server_error")
    assert gateway.trace(f"broken-{chat}")["finish_reason"] == "error"
    assert client.completions.create(**SHORT).choices[0].text, "the next request is served"


def test_a_failure_before_the_answer_is_500(client: openai.OpenAI, gateway: Gateway) -> None:
    gateway.large.fail_in = 1
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(**SHORT)
    assert code(caught.value) == ("engine_error", "server_error")


def test_a_full_queue_is_429_with_retry_after(gateway: Gateway) -> None:
    config = msgspec.structs.replace(TINY, engine=EngineConfig(max_queue=1))
    with gateway.serving(config) as url, client_of(url) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(**SHORT, n=2)
        assert code(caught.value) == ("queue_full", "rate_limit_error")
        assert int(caught.value.response.headers["retry-after"]) >= 1


def keys(**scopes: Scope) -> Keyring:
    return Keyring(Key(name, digest_of(name), frozenset([scope])) for name, scope in scopes.items())


def test_keys_and_scopes(gateway: Gateway) -> None:
    ring = keys(infers=Scope.INFER, reads=Scope.READ)
    with gateway.serving(keys=ring) as url:
        with client_of(url, "infers") as client:
            assert client.completions.create(**SHORT).choices
            with pytest.raises(openai.PermissionDeniedError) as caught:
                client.get("/traces", cast_to=object)
            assert caught.value.type == "permission_error"
        with client_of(url, "reads") as client:
            assert client.get("/traces", cast_to=object)
            with pytest.raises(openai.PermissionDeniedError):
                client.completions.create(**SHORT)
        with client_of(url, "guessed") as client, pytest.raises(openai.AuthenticationError) as unknown:
            client.models.list()
        assert unknown.value.type == "authentication_error"


def test_a_keys_share_of_requests_and_tokens(gateway: Gateway) -> None:
    auth = AuthConfig(max_concurrent=1, tokens_per_minute=100)
    config, ring = msgspec.structs.replace(TINY, auth=auth), keys(a=Scope.INFER, b=Scope.INFER)
    with gateway.serving(config, ring) as url, client_of(url, "a") as a, client_of(url, "b") as b:
        gateway.large.open.clear()
        with a.completions.create(**LONG, stream=True) as stream:
            with pytest.raises(openai.RateLimitError) as caught:
                a.completions.create(**SHORT)
            assert caught.value.code == "concurrency_limit"
            gateway.large.open.set()
            assert sum(1 for _ in stream)
        gateway.wait_until_left()
        with pytest.raises(openai.RateLimitError) as caught:
            a.completions.create(**SHORT)
        assert caught.value.code == "token_rate_limit"
        assert int(caught.value.response.headers["retry-after"]) > 30, "105 too many at 100 a minute"
        assert b.completions.create(**SHORT).choices


def test_the_deadline_is_504(gateway: Gateway) -> None:
    config = msgspec.structs.replace(TINY, server=ServerConfig(request_timeout_s=0.1))
    with gateway.serving(config) as url, client_of(url) as client:
        gateway.large.open.clear()
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(**LONG)
        assert caught.value.status_code == 504
        assert code(caught.value) == ("deadline_exceeded", "timeout_error")
        with client.completions.create(**LONG, stream=True) as stream, pytest.raises(openai.APIError) as late:
            next(stream)
        assert code(late.value) == ("deadline_exceeded", "timeout_error")


def test_silence_is_filled_with_comments(gateway: Gateway) -> None:
    config = msgspec.structs.replace(TINY, server=ServerConfig(keepalive_s=0.05))
    with gateway.serving(config) as url, client_of(url) as client:
        gateway.large.open.clear()
        with client.completions.with_streaming_response.create(**SHORT, stream=True) as response:
            lines = response.iter_lines()
            assert next(line for line in lines if line) == ": keep-alive"
            gateway.large.open.set()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        with client.completions.create(**SHORT, stream=True) as stream:
            assert list(stream), "the client passes over comments"


def test_who_leaves_frees_the_slot_and_is_recorded(client: openai.OpenAI, gateway: Gateway) -> None:
    gateway.large.open.clear()
    for stream in (True, False):
        headers = {"x-request-id": f"left-{stream}"}
        if stream:
            with client.completions.create(**LONG, stream=True, extra_headers=headers):
                pass
        else:
            with pytest.raises(openai.APITimeoutError):
                client.completions.create(**LONG, extra_headers=headers, timeout=0.2)
    gateway.wait_until_left()
    gateway.large.open.set()
    assert client.completions.create(**SHORT).choices
    for stream in (True, False):
        assert gateway.trace(f"left-{stream}")["finish_reason"] == "abort"

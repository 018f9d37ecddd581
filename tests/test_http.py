"""What is the same for every route: ids, the error envelope, limits, methods."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import structlog
from serving import TINY, FakeGateway, fake_gateway

from gateway.api.http import HANDLERS
from gateway.config import Config, ServerConfig
from gateway.tiny import CHAT_TEMPLATE


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGateway]:
    config = Config(models=TINY.models, server=ServerConfig(max_body_mib=0.01))
    with fake_gateway(config, tmp_path_factory.mktemp("tape")) as gateway:
        yield gateway


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    """The envelope of an error response of that status."""
    assert status == response.status_code, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert {"error"} == set(body)
    assert {"message", "type", "param", "code"} == set(body["error"])
    assert body["error"]["message"]
    return dict(body["error"])


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
COMPLETION = {"model": "tiny", "prompt": "x"}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/nothing", None, 404, "not_found"),
        ("POST", "/v1", None, 404, "not_found"),
        ("GET", "/v1/completions", None, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", None, 405, "method_not_allowed"),
        ("POST", "/v1/completions", b"{", 400, "invalid_json"),
        ("POST", "/v1/completions", {**COMPLETION, "model": "gpt-4"}, 404, "model_not_found"),
        ("POST", "/v1/chat/completions", {**CHAT, "model": "gpt-4"}, 404, "model_not_found"),
        ("POST", "/tokenize", {"model": "gpt-4", "prompt": ""}, 404, "model_not_found"),
        ("POST", "/v1/completions", {**COMPLETION, "prompt": "x" * 11_000}, 413, "body_too_large"),
        ("POST", "/v1/completions", {**COMPLETION, "max_tokens": 4096}, 400, "context_length_exceeded"),
        ("POST", "/v1/completions", {**COMPLETION, "logit_bias": {"999": 1}}, 400, "invalid_value"),
        ("POST", "/v1/completions", {**COMPLETION, "prompt": [999]}, 400, "invalid_value"),
        ("POST", "/v1/completions", {**COMPLETION, "n": 129}, 400, None),
        ("POST", "/detokenize", {"model": "tiny", "tokens": [999]}, 400, "invalid_value"),
        ("GET", "/v1/models/gpt-4", None, 404, "model_not_found"),
        ("GET", "/v1/traces/absent", None, 404, "trace_not_found"),
        ("GET", "/v1/traces/absent/steps", None, 404, "trace_not_found"),
        ("GET", "/v1/traces/absent/replay", None, 404, "trace_not_found"),
        ("GET", "/v1/traces?limit=0", None, 400, "invalid_value"),
        ("GET", "/v1/traces?limit=x", None, 400, "invalid_value"),
        ("GET", "/v1/traces?cursor=zzz", None, 400, "invalid_value"),
        ("GET", "/v1/traces?colour=red", None, 400, "unknown_parameter"),
        ("GET", "/v1/traces?limit=1&limit=2", None, 400, "invalid_value"),
    ],
)  # fmt: skip
def test_errors_have_one_envelope(
    gateway: FakeGateway, method: str, path: str, body: Any, status: int, code: str | None
) -> None:
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"} if content else {}
    response = gateway.http.request(method, path, content=content, headers=headers)
    assert code == error(response, status)["code"]


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_another_content_type_is_415(gateway: FakeGateway, content_type: str) -> None:
    response = gateway.http.post(
        "/v1/completions", content=json.dumps(COMPLETION), headers={"content-type": content_type}
    )
    assert content_type in error(response, 415)["message"]


def test_json_with_a_charset_is_read_and_a_body_without_a_type_is_not(gateway: FakeGateway) -> None:
    content, headers = json.dumps(COMPLETION), {"content-type": "application/json; charset=utf-8"}
    assert gateway.http.post("/v1/completions", content=content, headers=headers).status_code == 200
    error(gateway.http.post("/v1/completions", content=content), 415)


def test_a_chunked_body_is_limited_too(gateway: FakeGateway) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(20):
            yield b" " * 1024

    headers = {"content-type": "application/json"}
    error(gateway.http.post("/v1/completions", content=chunks(), headers=headers), 413)


def test_a_fault_inside_is_500_and_tells_nothing(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*_: object, **__: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(gateway.worker, "submit", explode)
    told = error(gateway.post("/v1/completions", COMPLETION), 500)
    assert "secret" not in told["message"]
    assert (told["type"], told["code"]) == ("server_error", "internal_error")


def test_every_response_has_an_id_and_echoes_a_good_one(gateway: FakeGateway) -> None:
    assert gateway.http.get("/health").headers["x-request-id"].startswith("req-")
    assert gateway.http.get("/v1/models", headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"


def test_models(gateway: FakeGateway) -> None:
    (model,) = gateway.http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 4096)
    assert model == gateway.http.get("/v1/models/tiny").json()


def test_tokenize_there_and_back(gateway: FakeGateway) -> None:
    text = "Zażółć 👩‍👩‍👧"
    tokens = gateway.post("/tokenize", {"model": "tiny", "prompt": text}).json()
    assert {"count": len(text.encode()), "max_model_len": 4096, "tokens": list(text.encode())} == tokens
    back = gateway.post("/detokenize", {"model": "tiny", "tokens": tokens["tokens"]}).json()
    assert {"prompt": text} == back


def test_tokenizer_info(gateway: FakeGateway) -> None:
    info = gateway.http.get("/tokenizer_info").json()
    assert info["chat_template"] == CHAT_TEMPLATE
    assert (info["eos_token"], info["model_max_length"]) == ("<|im_end|>", 4096)
    assert info["tokenizer_class"]


def test_one_access_line_a_request_with_the_trace_id(gateway: FakeGateway) -> None:
    with structlog.testing.capture_logs() as lines:
        response = gateway.post("/v1/completions", {**COMPLETION, "max_tokens": 5})
        gateway.http.get("/v1/models")
    mine = [line for line in lines if line.get("request_id") == response.json()["id"]]
    assert len(mine) == 1
    assert tuple(
        mine[0][key] for key in ("method", "path", "status", "completion_tokens", "finish_reason")
    ) == ("POST", "/v1/completions", 200, 5, "length")


def test_a_stream_is_one_access_line(gateway: FakeGateway) -> None:
    with structlog.testing.capture_logs() as lines:
        response = gateway.post("/v1/completions", {**COMPLETION, "max_tokens": 5, "stream": True})
        trace_id = response.headers["x-request-id"]
        gateway.http.get("/health")
    mine = [line for line in lines if line.get("request_id") == trace_id]
    assert [line["completion_tokens"] for line in mine] == [5]


def test_no_route_is_left_out() -> None:
    paths = {path for handler in HANDLERS for path in handler.paths}
    assert {"/v1/completions", "/v1/chat/completions", "/metrics", "/v1/traces/{trace_id:str}/steps"} <= paths


def test_headers_are_limited(gateway: FakeGateway) -> None:
    response = gateway.http.get("/v1/models", headers={"x-padding": "x" * 40_000})
    assert error(response, 431)["code"] == "headers_too_large"

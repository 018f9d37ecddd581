from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from serving import FakeGateway, fake_gateway

from gateway.api.http import HANDLERS
from gateway.api.route import ROUTE
from gateway.routing import Routing
from gateway.wire import CompletionRequest
from gateway.wire_chat import ChatRequest


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGateway]:
    with fake_gateway(data_dir=tmp_path_factory.mktemp("tape")) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def document(gateway: FakeGateway) -> dict[str, Any]:
    document: dict[str, Any] = gateway.http.get("/openapi.json").json()
    return document


def matches(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    """Raises where the value is not of the schema."""
    resolvable = {**schema, "components": document["components"]}
    jsonschema.Draft202012Validator(resolvable).validate(value)


def answer_schema(document: dict[str, Any], path: str, method: str, status: int) -> dict[str, Any]:
    responses = document["paths"][path][method]["responses"]
    schema: dict[str, Any] = responses[str(status)]["content"]["application/json"]["schema"]
    return schema


def test_every_handler_is_described(document: dict[str, Any]) -> None:
    assert [handler.fn.__name__ for handler in HANDLERS if ROUTE not in handler.opt] == []
    described = {(path, method) for path, item in document["paths"].items() for method in item}
    assert len(described) == sum(len(h.paths) * len(h.http_methods) for h in HANDLERS)
    assert ("/v1/traces/{trace_id}/steps", "get") in described


def test_every_field_is_described(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for kind in (CompletionRequest, ChatRequest, Routing):
        assert set(kind.__struct_fields__) == set(schemas[kind.__name__]["properties"])
        assert schemas[kind.__name__]["additionalProperties"] is False


def test_all_references_resolve(document: dict[str, Any]) -> None:
    names = set(document["components"]["schemas"])
    text = json.dumps(document)
    used = {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert used <= names
    assert used


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/completions",
            {"model": "tiny", "prompt": "x", "logprobs": 2, "n": 2, "return_token_ids": True},
        ),
        ("/v1/completions", {"model": "tiny", "prompt": [[1, 2], [3]]}),
        ("/v1/completions", {"model": "tiny", "prompt": "x", "foo": 1}),
        ("/v1/completions", {"model": "none", "prompt": "x"}),
        (
            "/v1/chat/completions",
            {
                "model": "tiny",
                "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
                "logprobs": True,
                "top_logprobs": 1,
            },
        ),
        ("/v1/chat/completions", {"model": "tiny", "messages": []}),
        ("/tokenize", {"model": "tiny", "prompt": "x"}),
        ("/detokenize", {"model": "tiny", "tokens": [1]}),
    ],
)
def test_answers_are_of_their_schema(
    gateway: FakeGateway, document: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    response = gateway.post(path, body)
    matches(document, answer_schema(document, path, "post", response.status_code), response.json())
    if response.status_code == 200:
        request = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        matches(document, request, body)


@pytest.mark.parametrize(
    "path", ["/v1/models", "/health", "/ready", "/v1/traces", "/v1/replay", "/openapi.json"]
)
def test_gets_are_of_their_schema(gateway: FakeGateway, document: dict[str, Any], path: str) -> None:
    gateway.post("/v1/completions", {"model": "tiny", "prompt": "x"})
    response = gateway.http.get(path)
    matches(document, answer_schema(document, path, "get", response.status_code), response.json())


def test_conflicts_are_described_where_state_may_forbid(document: dict[str, Any]) -> None:
    for path in ("/v1/rollouts", "/v1/rollouts/{name}/{action}", "/v1/traces/{trace_id}/what-if"):
        assert "409" in document["paths"][path]["post"]["responses"]
    assert "409" not in document["paths"]["/v1/traces"]["get"]["responses"]


def test_a_mixed_prompt_is_refused_by_schema_and_gateway(
    gateway: FakeGateway, document: dict[str, Any]
) -> None:
    body = {"model": "tiny", "prompt": ["a", 1]}
    with pytest.raises(jsonschema.ValidationError):
        matches(document, {"$ref": "#/components/schemas/CompletionRequest"}, body)
    assert gateway.post("/v1/completions", body).status_code == 400

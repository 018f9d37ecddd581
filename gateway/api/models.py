"""GET /v1/models, and the tokenizer: POST /tokenize, POST /detokenize."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, Response, get, post
from litestar.params import FromPath

from gateway.access import Scope
from gateway.api.bodies import read_body
from gateway.api.route import Route
from gateway.api.service import Service, service_of
from gateway.wire import BodyError, DetokenizeRequest, TokenizeRequest
from gateway.wire_out import ModelCard, ModelList, Prompt, Tokens

HttpRequest = Request[Any, Any, Any]


@get("/v1/models", opt=Route(Scope.INFER, returns=ModelList).opt)
async def list_models(request: HttpRequest) -> Response[bytes]:
    """The one served model: a pair under one name."""
    return as_json(ModelList(data=[_card(service_of(request.app.state))]))


@get("/v1/models/{model_id:path}", opt=Route(Scope.INFER, returns=ModelCard).opt)
async def get_model(request: HttpRequest, model_id: FromPath[str]) -> Response[bytes]:
    """That model, or 404."""
    service = service_of(request.app.state)
    service.check_model(model_id.removeprefix("/"))
    return as_json(_card(service))


@post("/tokenize", status_code=200, opt=Route(Scope.INFER, body=TokenizeRequest, returns=Tokens).opt)
async def tokenize(request: HttpRequest) -> Response[bytes]:
    """Token ids of a text."""
    service = service_of(request.app.state)
    body = await read_body(request, TokenizeRequest)
    engine = service.engine_or_503()
    service.check_model(body.model)
    try:
        tokens = engine.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    except ValueError as error:
        raise BodyError(f"prompt: {error}", "prompt", "invalid_value") from None
    return as_json(Tokens(count=len(tokens), max_model_len=engine.max_model_len, tokens=tokens))


@post("/detokenize", status_code=200, opt=Route(Scope.INFER, body=DetokenizeRequest, returns=Prompt).opt)
async def detokenize(request: HttpRequest) -> Response[bytes]:
    """The text of token ids."""
    service = service_of(request.app.state)
    body = await read_body(request, DetokenizeRequest)
    engine = service.engine_or_503()
    service.check_model(body.model)
    for token in body.tokens:
        if token >= engine.tokenizer.vocab_size:
            raise BodyError(
                f"tokens: token id {token} is not in the vocabulary of {engine.tokenizer.vocab_size} tokens",
                "tokens",
                "invalid_value",
            )
    return as_json(Prompt(prompt=engine.tokenizer.decode(body.tokens, skip_special_tokens=False)))


@get("/tokenizer_info", opt=Route(Scope.INFER, returns=dict[str, Any]).opt)
async def tokenizer_info(request: HttpRequest) -> Response[bytes]:
    """The tokenizer's configuration and chat template, as vLLM shows them."""
    return as_json(service_of(request.app.state).engine_or_503().tokenizer.info())


def as_json(body: Any, status: int = 200) -> Response[bytes]:
    """An answer with a struct as its body."""
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


def _card(service: Service) -> ModelCard:
    engine = service.engine_or_503()
    return ModelCard(id=service.model_name, created=service.created, max_model_len=engine.max_model_len)

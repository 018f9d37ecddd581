from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.wire import BodyError, CompletionRequest, decode, fields
from gateway.wire_chat import ChatRequest

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}


def error(kind: Any, body: Any) -> BodyError:
    with pytest.raises(BodyError) as caught:
        decode(body if isinstance(body, bytes) else json.dumps(body).encode(), kind)
    return caught.value


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"foo": 1}, "foo"),
        ({"routing": {"foo": 1}}, "routing.foo"),
        ({"routing": {"mode": "fast"}}, "routing.mode"),
        ({"routing": {"accept": "all"}}, "routing.accept"),
        ({"routing": {"threshold": 1.1}}, "routing.threshold"),
        ({"routing": {"threshold": -0.1}}, "routing.threshold"),
        ({"routing": {"accept_threshold": 2}}, "routing.accept_threshold"),
        ({"routing": {"alpha": 2}}, "routing.alpha"),
        ({"routing": {"draft_length": 0}}, "routing.draft_length"),
        ({"routing": {"draft_length": 33}}, "routing.draft_length"),
        ({"routing": {"protect_first": -1}}, "routing.protect_first"),
        ({"routing": {"max_small_run": 0}}, "routing.max_small_run"),
        ({"routing": {"small_repetition_penalty": 0}}, "routing.small_repetition_penalty"),
        ({"routing": {"audit_rate": 1.5}}, "routing.audit_rate"),
        ({"routing": {"policy": ""}}, "routing.policy"),
        ({"routing": []}, "routing"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 10**30}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 5e-324}, "repetition_penalty"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"usage": True}}, "stream_options.usage"),
        ({"model": 3}, "model"),
        ({"metadata": {"a": 1}}, "metadata"),
    ],
)
@pytest.mark.parametrize(("kind", "base"), [(CompletionRequest, TEXT), (ChatRequest, CHAT)])
def test_each_bad_value_is_named(kind: Any, base: dict[str, Any], change: dict[str, Any], param: str) -> None:
    assert param == error(kind, {**base, **change}).param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "m"}, "prompt"),
        ({"prompt": "x"}, "model"),
        ({**TEXT, "prompt": []}, "prompt"),
        ({**TEXT, "prompt": [1, 2.5]}, "prompt[1]"),
        ({**TEXT, "prompt": [-1]}, "prompt[0]"),
        ({**TEXT, "prompt": {"a": 1}}, "prompt"),
        ({**TEXT, "logprobs": 21}, "logprobs"),
        ({**TEXT, "logprobs": True}, "logprobs"),
        ({**TEXT, "best_of": 0}, "best_of"),
        ({**TEXT, "messages": []}, "messages"),
    ],
)
def test_completion_fields(body: dict[str, Any], param: str) -> None:
    assert param == error(CompletionRequest, body).param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "m"}, "messages"),
        ({**CHAT, "messages": []}, "messages"),
        ({**CHAT, "messages": [{"content": "x"}]}, "messages[0].role"),
        ({**CHAT, "messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({**CHAT, "messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        ({**CHAT, "messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
        ({**CHAT, "top_logprobs": 21}, "top_logprobs"),
        ({**CHAT, "logprobs": 3}, "logprobs"),
        ({**CHAT, "max_tokens": 0}, "max_tokens"),
        ({**CHAT, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({**CHAT, "prompt": "x"}, "prompt"),
    ],
)  # fmt: skip
def test_chat_fields(body: dict[str, Any], param: str) -> None:
    assert param == error(ChatRequest, body).param


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"nonsense", b'{"model": NaN}', b'{"model":"m","prompt":"x"} x', b"\xff"]
)
def test_bad_json_has_its_own_code(raw: bytes) -> None:
    assert error(CompletionRequest, raw).code == "invalid_json"


def test_deep_nesting_is_an_error_not_a_crash() -> None:
    deep = (
        b'{"model":"m","messages":[],"chat_template_kwargs":{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}}"
    )
    assert error(ChatRequest, deep)


def test_null_means_absent_for_every_optional_field() -> None:
    for kind, base in ((CompletionRequest, TEXT), (ChatRequest, CHAT)):
        plain = decode(json.dumps(base).encode(), kind)
        nulls = dict.fromkeys(kind.__struct_fields__) | base
        assert plain == decode(json.dumps(nulls).encode(), kind)


def test_fields_are_what_the_client_set() -> None:
    body = {**TEXT, "seed": 3, "stop": None, "routing": {"mode": "large_only"}, "user": "u"}
    told = fields(decode(json.dumps(body).encode(), CompletionRequest))
    assert {k: v for k, v in body.items() if v is not None} == told


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=6,
)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.sampled_from(ChatRequest.__struct_fields__) | st.text(), json_values))
def test_any_json_decodes_or_names_a_field(body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode("utf-8", "replace")
    problem = None
    try:
        decode(raw, ChatRequest)
    except BodyError as error:
        problem = error
    assert problem is None or problem.param is not None or problem.code == "invalid_json"

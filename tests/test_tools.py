"""Tool calls: offered through the chat template, held by a grammar when forced, read from the text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fake_worker import tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from serving import FakeGateway, fake_gateway

from gateway.api.tools import Call, ToolCallReader, constraint_of, offered, parse_call
from gateway.grammar import Grammars
from gateway.text import Tokenizer
from gateway.tiny import CHAT_TEMPLATE, IM_END_ID, byte_tokenizer
from gateway.wire import BodyError, decode
from gateway.wire_chat import ChatRequest

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
BAD_SCHEMA = {"name": "x", "schema": {"type": "colour"}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TALK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>'
GRAMMARS = Grammars(tiny_tokenizer(), 259)


def chat(**body: Any) -> ChatRequest:
    return decode(json.dumps({**TALK, **body}).encode(), ChatRequest)


def refusal(**body: Any) -> str | None:
    with pytest.raises(BodyError) as caught:
        constraint_of(chat(**body), GRAMMARS)
    return caught.value.param


def read(text: str, sizes: list[int], single: bool = False) -> tuple[str, list[Call]]:
    """The text in pieces of these sizes, again and again."""
    reader = ToolCallReader(single)
    content, calls, at, turn = "", [], 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        said, made = reader.push(text[at : at + size])
        content, calls, at, turn = content + said, calls + made, at + size, turn + 1
    return content + reader.flush(), calls


@given(st.lists(st.integers(1, 9), min_size=1))
def test_calls_are_found_however_the_text_is_cut(sizes: list[int]) -> None:
    content, calls = read(f"Let me see. {CALL}\n{CALL}\n", sizes)
    assert content == "Let me see. "
    assert calls == [Call("weather", '{"city":"Łódź"}')] * 2


@given(st.text(alphabet="<tool_call>/ab\n", max_size=60), st.lists(st.integers(1, 5), min_size=1))
def test_text_without_a_call_is_all_content(text: str, sizes: list[int]) -> None:
    assert read(text, sizes) == (text, [])


@pytest.mark.parametrize(
    "body", ["", "{", "[]", '{"name": 3}', '{"arguments": {}}', "null", '"x"', "[" * 100_000]
)
def test_what_is_no_call_stays_content(body: str) -> None:
    assert parse_call(body) is None
    text = f"<tool_call>{body}</tool_call> after"
    assert read(text, [3]) == (text, [])


def test_an_unfinished_call_is_content() -> None:
    text = f"{CALL}\n<tool_call>\n" + '{"name": "wea'
    content, calls = read(text, [4])
    assert (content, len(calls)) == ('<tool_call>\n{"name": "wea', 1)


def test_single_leaves_further_calls_out() -> None:
    assert read(f"{CALL}\n{CALL}", [5], single=True) == ("", [Call("weather", '{"city":"Łódź"}')])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "none"}}},
            "tool_choice.function.name",
        ),
        (
            {"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "y"}},
                }
            },
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "min_tokens"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    assert refusal(**body) == param


def test_nothing_asked_is_no_grammar() -> None:
    assert constraint_of(chat(), GRAMMARS) is None
    assert constraint_of(chat(response_format={"type": "text"}), GRAMMARS) is None
    assert constraint_of(chat(tools=[WEATHER]), GRAMMARS) is None


def test_tool_choice_none_offers_none() -> None:
    assert offered(chat(tools=[WEATHER], tool_choice="none")) is None
    assert offered(chat(tools=[WEATHER])) == [WEATHER]


def test_a_forced_call_allows_only_that_tool() -> None:
    choice = {"type": "function", "function": {"name": "clock"}}
    make = constraint_of(chat(tools=[WEATHER, CLOCK], tool_choice=choice), GRAMMARS)
    assert make is not None
    matcher = make()
    for token in b'<tool_call>\n{"name": "':
        matcher.advance(token)
    assert [int(i) for i in matcher.mask().nonzero().flatten()] == [ord("c")]


def tools_tokenizer() -> Tokenizer:
    """The tiny tokenizer with a template that shows tools."""
    hf = byte_tokenizer()
    hf.chat_template = "{% for t in tools or [] %}[{{ t['function']['name'] }}]{% endfor %}" + CHAT_TEMPLATE
    return Tokenizer(hf, {IM_END_ID})


@pytest.fixture(scope="module")
def gateway() -> Iterator[FakeGateway]:
    with fake_gateway() as gateway:
        gateway.worker.tokenizer = tools_tokenizer()
        gateway.worker.answer = f"Hm. {CALL}<end>"
        yield gateway


BODY = {**TALK, "tools": [WEATHER], "max_tokens": 200, "stop": "<end>"}
URL = "/v1/chat/completions"


def test_a_call_in_a_whole_answer(gateway: FakeGateway) -> None:
    (choice,) = gateway.post(URL, BODY).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Hm. "
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city":"Łódź"}'}
    assert call["id"].startswith("call_")
    assert gateway.worker.tokenizer.decode(gateway.worker.seen[-1].prompt_ids).startswith("[weather]")


def test_a_call_in_a_stream(gateway: FakeGateway) -> None:
    lines = gateway.post(URL, {**BODY, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == "Hm. "
    (call,) = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert (call["index"], call["function"]["name"]) == (0, "weather")
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_without_tools_the_text_is_left_alone(gateway: FakeGateway) -> None:
    for body in ({**BODY, "tools": None}, {**BODY, "tool_choice": "none"}):
        (choice,) = gateway.post(URL, body).json()["choices"]
        assert choice["message"]["content"] == f"Hm. {CALL}"
        assert choice["finish_reason"] == "stop"


def test_earlier_calls_and_results_go_through_the_template(gateway: FakeGateway) -> None:
    messages = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    assert gateway.post(URL, {**BODY, "messages": messages}).status_code == 200
    bad = json.loads(json.dumps(messages).replace('"{}"', '"{"'))
    assert gateway.post(URL, {**BODY, "messages": bad}).json()["error"]["param"] == "messages[1].tool_calls"


def test_a_template_without_a_place_for_tools_is_400(gateway: FakeGateway) -> None:
    gateway.worker.tokenizer, before = tiny_tokenizer(), gateway.worker.tokenizer
    response = gateway.post(URL, BODY)
    gateway.worker.tokenizer = before
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")

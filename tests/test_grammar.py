from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from fake_worker import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.grammar import GrammarError, Grammars, Matcher
from gateway.tiny import IM_END_ID

TOKENIZER = tiny_tokenizer()
GRAMMARS = Grammars(TOKENIZER, vocab_size=320)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def allowed(matcher: Matcher) -> list[int]:
    """The ids that may come now."""
    mask = matcher.mask()
    assert mask.numel() == 320
    return [int(i) for i in mask.nonzero().flatten()]


def write(matcher: Matcher, rng: random.Random, limit: int = 400) -> str:
    """A random walk through the grammar."""
    out: list[int] = []
    while len(out) < limit:
        token = rng.choice(allowed(matcher))
        if token in TOKENIZER.eos_ids:
            return TOKENIZER.decode(out)
        matcher.advance(token)
        out.append(token)
    pytest.fail("the grammar did not end")


def test_whatever_is_sampled_is_of_the_schema() -> None:
    make = GRAMMARS.json_schema(PERSON)
    for seed in range(10):
        value = json.loads(write(make(), random.Random(seed), limit=3000))
        assert {"name", "age"} == set(value)
        assert len(value["name"]) <= 5
        assert value["age"] <= 99


def test_the_end_comes_only_when_it_may() -> None:
    matcher = GRAMMARS.json_object()()
    for token in b'{"a": 1':
        assert not TOKENIZER.eos_ids & set(allowed(matcher))
        matcher.advance(token)
    matcher.advance(ord("}"))
    assert TOKENIZER.eos_ids & set(allowed(matcher))


def test_padding_of_the_head_is_never_allowed() -> None:
    matcher = GRAMMARS.json_object()()
    assert max(allowed(matcher)) < TOKENIZER.vocab_size


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.integers(1, 6), max_size=8))
def test_rollback_is_as_if_the_tokens_had_never_come(seed: int, drafts: list[int]) -> None:
    make, rng = GRAMMARS.json_schema(PERSON), random.Random(seed)
    matcher, kept = make(), []
    for num in drafts:
        accepted = rng.randint(0, num)
        for i in range(num):
            token = rng.choice(allowed(matcher))
            matcher.advance(token)
            if i < accepted:
                kept.append(token)
        matcher.rollback(num - accepted)
        fresh = make()
        for token in kept:
            fresh.advance(token)
        assert allowed(fresh) == allowed(matcher)


def test_a_token_outside_the_grammar_ends_the_answer_and_rolls_back() -> None:
    matcher = GRAMMARS.json_object()()
    before = allowed(matcher)
    matcher.advance(ord("x"))
    matcher.advance(ord("y"))
    assert sorted(TOKENIZER.eos_ids) == allowed(matcher)
    matcher.rollback(2)
    assert before == allowed(matcher)


def test_after_the_end_only_the_end() -> None:
    matcher = GRAMMARS.json_schema({"const": 1})()
    matcher.advance(ord("1"))
    matcher.advance(IM_END_ID)
    assert sorted(TOKENIZER.eos_ids) == allowed(matcher)
    matcher.rollback(1)
    assert TOKENIZER.eos_ids & set(allowed(matcher))


@pytest.mark.parametrize(
    "schema", [{"type": "colour"}, {"type": "string", "format": "no-such"}, {"not": {"type": "object"}}]
)
def test_a_schema_that_cannot_be_held_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError):
        GRAMMARS.json_schema(schema)


def calls(make: Callable[[], Matcher], seed: int) -> list[Any]:
    """The calls of a random walk."""
    text = write(make(), random.Random(seed), limit=5000)
    parts = text.removesuffix("\n</tool_call>").removeprefix("<tool_call>\n")
    return [json.loads(part) for part in parts.split("\n</tool_call>\n<tool_call>\n")]


def test_tool_calls_name_a_tool_and_fit_its_parameters() -> None:
    tools = {"greet": PERSON, "stop": {"type": "object", "additionalProperties": False}}
    seen = set()
    for seed in range(8):
        (call,) = calls(GRAMMARS.tool_calls(tools, parallel=False), seed)
        seen.add(call["name"])
        assert (
            {"name", "age"} == set(call["arguments"]) if call["name"] == "greet" else call["arguments"] == {}
        )
    assert {"greet", "stop"} == seen


def test_parallel_calls_may_be_several() -> None:
    tools = {"stop": {"type": "object", "additionalProperties": False}}
    assert max(len(calls(GRAMMARS.tool_calls(tools, parallel=True), seed)) for seed in range(12)) > 1

"""Every request field by what the real `openai` client sees of it, on the real engine over `tiny`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import openai
import pytest
import torch
from openai_gateway import MESSAGES, ROUTINGS, TOOL_TEMPLATE, Gateway, serve_tiny
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from tiny_pair import TinyPair

PROMPT = "Hello"
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["👩‍👩‍👧 你好 e\u0301"]}}}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
IM_START, IM_END = 257, 258


@pytest.fixture(scope="module")
def gateway(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with serve_tiny(tiny_pair, tmp_path_factory.mktemp("tape"), TOOL_TEMPLATE) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with gateway.serving() as url, openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        yield client


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    """A completion of PROMPT, greedy unless told otherwise; fields of vLLM's and ours go along."""
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "seed": 7, **fields}
    return client.completions.create(model="tiny", prompt=body.pop("prompt"), extra_body=body)


def text(client: openai.OpenAI, **fields: Any) -> str:
    return str(complete(client, **fields).choices[0].text)


def chat(client: openai.OpenAI, messages: Any = MESSAGES, **fields: Any) -> Any:
    """A greedy chat."""
    body = {"max_tokens": 16, "temperature": 0, "seed": 7, **fields}
    return client.chat.completions.create(model="tiny", messages=messages, extra_body=body)


def prompt_of(client: openai.OpenAI, messages: Any = MESSAGES, **fields: Any) -> bytes:
    """The chat's prompt as bytes; control tokens are left out."""
    ids = chat(client, messages, max_tokens=1, return_token_ids=True, **fields).prompt_token_ids
    return bytes(i for i in ids if i < 256)


def refused(client: openai.OpenAI, ask: Callable[..., Any], **fields: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        ask(client, **fields)
    return caught.value


@pytest.fixture(scope="module")
def hf(tiny_pair: TinyPair) -> dict[str, Any]:
    """Hugging Face's own models, for expected values."""
    return {
        name: AutoModelForCausalLM.from_pretrained(tiny_pair.folder / name, dtype=torch.float32)
        for name in ("small", "large")
    }


def greedy(model: Any, change: Callable[[torch.Tensor, list[int]], torch.Tensor]) -> list[int]:
    """24 greedy tokens after PROMPT, each under changed logits, by the definition."""
    prompt, out = list(PROMPT.encode()), []
    for _ in range(24):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + out])).logits[0, -1]
        out.append(int(change(logits, out).argmax()))
        if out[-1] >= 256:
            break
    return out


def counts(out: list[int]) -> torch.Tensor:
    return torch.bincount(torch.tensor(out, dtype=torch.long), minlength=259).float()


def repetition(logits: torch.Tensor, out: list[int]) -> torch.Tensor:
    """CTRL's penalty (Keskar et al., 2019) over prompt and answer."""
    seen = counts([*PROMPT.encode(), *out]) > 0
    return torch.where(seen, torch.where(logits > 0, logits / 1.7, logits * 1.7), logits)


def biased(logits: torch.Tensor, out: list[int]) -> torch.Tensor:
    logits[ord("e")] += 3.5
    return logits


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        ({}, lambda logits, out: logits),
        ({"presence_penalty": 1.5}, lambda logits, out: logits - 1.5 * (counts(out) > 0)),
        ({"frequency_penalty": 1.2}, lambda logits, out: logits - 1.2 * counts(out)),
        ({"repetition_penalty": 1.7}, repetition),
        ({"logit_bias": {str(ord("e")): 3.5}}, biased),
    ],
    ids=["plain", "presence", "frequency", "repetition", "bias"],
)
def test_logits_change_per_token_whoever_writes(
    client: openai.OpenAI, hf: dict[str, Any], fields: dict[str, Any], change: Any
) -> None:
    by_hf = {name: greedy(model, change) for name, model in hf.items()}
    for name, routing in ROUTINGS.items():
        expected = by_hf["small" if name == "small_only" else "large"]
        choice = complete(client, **fields, routing=routing, return_token_ids=True).choices[0]
        if name == "trust":
            assert len(choice.token_ids) == 24 or choice.finish_reason == "stop"
        else:
            assert choice.token_ids == expected, name


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_ends_hold_whoever_writes(client: openai.OpenAI, routing: dict[str, Any]) -> None:
    plain = text(client, routing=routing)
    stop = plain[6:9]
    cut = complete(client, routing=routing, stop=["never there", stop])
    assert cut.choices[0].text == plain[: plain.index(stop)]
    assert (cut.choices[0].finish_reason, cut.choices[0].stop_reason) == ("stop", stop)
    by_id = complete(client, routing=routing, stop_token_ids=[ord(plain[5])]).choices[0]
    assert by_id.text == plain[: plain.index(plain[5])]
    assert by_id.stop_reason == ord(plain[5])
    # The end of the text is wanted at once, and must wait for min_tokens.
    eager = {"logit_bias": {str(IM_END): 100}, "routing": routing}
    assert complete(client, **eager).usage.completion_tokens == 1
    held = complete(client, **eager, min_tokens=10)
    assert (held.usage.completion_tokens, held.choices[0].finish_reason) == (11, "stop")
    ignored = complete(client, **eager, ignore_eos=True)
    assert (ignored.usage.completion_tokens, ignored.choices[0].finish_reason) == (24, "length")


def test_prompts_as_text_and_ids_alone_and_in_lists(client: openai.OpenAI) -> None:
    one, other = text(client), text(client, prompt="Bye")
    ids, other_ids = list(b"Hello"), list(b"Bye")
    assert text(client, prompt=ids) == one
    for prompts in (["Hello", "Bye"], [ids, other_ids]):
        answer = complete(client, prompt=prompts)
        assert [choice.text for choice in answer.choices] == [one, other]
        assert answer.usage.prompt_tokens == 8


def test_n_and_best_of(client: openai.OpenAI) -> None:
    answer = complete(client, prompt=["Hello", "Bye"], n=2, best_of=2, temperature=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == 8
    assert refused(client, complete, n=2, best_of=3).param == "best_of"  # type: ignore[attr-defined]


def test_sampling_narrowed_to_one_token_is_greedy(client: openai.OpenAI) -> None:
    plain = text(client)
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1}, {"temperature": 1e-4}):
        assert text(client, **{"temperature": 1, **narrow}) == plain
    wide = {text(client, temperature=1, top_k=-1, top_p=1, min_p=0, seed=seed) for seed in range(3)}
    assert len(wide) == 3


def test_stop_with_itself_and_up_to_sixteen(client: openai.OpenAI) -> None:
    plain = text(client)
    stop = plain[4:7]
    assert text(client, stop=stop, include_stop_str_in_output=True) == plain[: plain.index(stop)] + stop
    assert text(client, stop=[*(f"{i} never" for i in range(15)), stop]) == plain[: plain.index(stop)]
    assert refused(client, complete, stop=[str(i) for i in range(17)]).param == "stop"  # type: ignore[attr-defined]


def test_stops_across_tokens_leak_nothing_and_what_was_held_comes(client: openai.OpenAI) -> None:
    plain = text(client)

    def streamed(stop: str) -> list[str]:
        with client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=24, temperature=0, stop=stop, stream=True
        ) as stream:
            return [chunk.choices[0].text for chunk in stream]

    for at in range(1, 20):
        stop = plain[at : at + 3]
        assert "".join(streamed(stop)) == plain[: plain.index(stop)]
    # The last character may always be the beginning of this one.
    assert "".join(streamed(plain[-1] + "never there")) == plain


def test_max_tokens_and_its_newer_name(client: openai.OpenAI) -> None:
    assert complete(client, max_tokens=3).usage.completion_tokens == 3
    assert chat(client, max_tokens=None, max_completion_tokens=5).usage.completion_tokens == 5
    assert refused(client, chat, max_tokens=0).param == "max_tokens"  # type: ignore[attr-defined]


def test_no_tokens_but_the_prompts_score(client: openai.OpenAI) -> None:
    scored = complete(client, max_tokens=0, echo=True, logprobs=2)
    more = complete(client, max_tokens=4, echo=True, logprobs=2)
    (choice,) = scored.choices
    assert (choice.text, choice.finish_reason, scored.usage.completion_tokens) == (PROMPT, "length", 0)
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs == more.choices[0].logprobs.token_logprobs[:5]
    assert choice.logprobs.tokens == list(PROMPT)
    with client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=0, echo=True, logprobs=2, stream=True
    ) as stream:
        chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(chunk.text for chunk in chunks) == PROMPT
    assert [t for c in chunks if c.logprobs for t in c.logprobs.tokens or []] == list(PROMPT)
    for wrong, param in (({}, "max_tokens"), ({"echo": True, "min_tokens": 1}, "min_tokens")):
        assert refused(client, complete, max_tokens=0, **wrong).param == param  # type: ignore[attr-defined]


def test_usage_in_streams(client: openai.OpenAI) -> None:
    def usages(**options: bool) -> list[Any]:
        more = {"stream_options": options} if options else {}
        with client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=24, stream=True, extra_body=more
        ) as stream:
            return [(len(chunk.choices), chunk.usage) for chunk in stream]

    assert all(usage is None for _, usage in usages())
    *others, (num_choices, last) = usages(include_usage=True)
    assert (num_choices, last.completion_tokens) == (0, 24)
    assert all(usage is None for _, usage in others)
    grown = [usage.completion_tokens for _, usage in usages(continuous_usage_stats=True)]
    assert grown == sorted(grown)
    assert grown[-1] == 24
    error = refused(client, complete, stream_options={"include_usage": True})
    assert error.param == "stream_options"  # type: ignore[attr-defined]


def test_chat_logprobs_carry_bytes(client: openai.OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    assert bytes(b for e in entries for b in e.bytes).decode() == answer.choices[0].message.content
    for entry in entries:
        assert [len(top.bytes) for top in entry.top_logprobs] == [1, 1]
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob)
    assert chat(client).choices[0].logprobs is None
    assert refused(client, chat, top_logprobs=2).param == "top_logprobs"  # type: ignore[attr-defined]


def test_token_ids_on_request(client: openai.OpenAI) -> None:
    (choice,) = complete(client, return_token_ids=True).choices
    assert choice.prompt_token_ids == list(PROMPT.encode())
    assert bytes(choice.token_ids).decode() == choice.text
    assert not hasattr(complete(client).choices[0], "token_ids")


def test_special_tokens_are_shown_when_wanted(client: openai.OpenAI) -> None:
    forced: Any = {"logit_bias": {str(IM_START): 100}, "max_tokens": 2}
    assert text(client, **forced) == ""
    assert text(client, **forced, skip_special_tokens=False) == "<|im_start|>" * 2


def test_labels_are_on_the_tape(client: openai.OpenAI, gateway: Gateway) -> None:
    labels = {"user": "u-1", "metadata": {"team": "a"}, "safety_identifier": "s", "prompt_cache_key": "k"}
    trace = gateway.trace(complete(client, **labels, service_tier="auto", store=True).id)
    assert {name: trace["params"][name] for name in labels} == labels


def test_roles_and_text_parts(client: openai.OpenAI) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]}]
    assert prompt_of(client, parts) == prompt_of(client, [{"role": "user", "content": "abc"}])
    system = prompt_of(client, [{"role": "system", "content": "Be."}, *MESSAGES])
    assert prompt_of(client, [{"role": "developer", "content": "Be."}, *MESSAGES]) == system
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    talk = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    assert b"tool\nsunny" in prompt_of(client, talk)
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    param = refused(client, chat, messages=image).param  # type: ignore[attr-defined]
    assert param.startswith("messages[0].content")


def test_templates_end_and_keyword_arguments(client: openai.OpenAI) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "Once upon"}]
    assert prompt_of(client, begun, continue_final_message=True).endswith(b"assistant\nOnce upon")
    assert prompt_of(client, begun).endswith(b"assistant\n")
    assert prompt_of(client, MESSAGES, add_generation_prompt=False).endswith(b"Say something.\n")
    assert prompt_of(client, chat_template_kwargs={"greeting": "Ahoy"}).startswith(b"Ahoy")


def test_forced_tool_calls_keep_their_schema(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        for routing in ROUTINGS.values():
            answer = chat(
                client,
                tools=[TOOL],
                tool_choice=choice,
                parallel_tool_calls=False,
                max_tokens=120,
                logit_bias={str(ord(c)): -100 for c in " \n\r\t"},
                routing=routing,
            )
            assert answer.choices[0].finish_reason == "tool_calls"
            (call,) = answer.choices[0].message.tool_calls
            assert call.function.name == "weather"
            assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")


def test_tools_are_shown_unless_none_is_to_be_called(client: openai.OpenAI) -> None:
    assert b"[weather]" in prompt_of(client, tools=[TOOL])
    assert b"[weather]" in prompt_of(client, tools=[TOOL], tool_choice="auto")
    assert prompt_of(client, tools=[TOOL], tool_choice="none") == prompt_of(client)
    other = {"type": "function", "function": {"name": "clock"}}
    error = refused(client, chat, tools=[TOOL], tool_choice=other)
    assert error.param == "tool_choice.function.name"  # type: ignore[attr-defined]


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_characters_of_many_tokens_come_whole(client: openai.OpenAI, routing: dict[str, Any]) -> None:
    fields: Any = {"model": "tiny", "messages": MESSAGES, "response_format": FORMAT, "max_tokens": 80}
    more = {"extra_body": {"routing": routing}}
    whole = client.chat.completions.create(**fields, **more).choices[0].message.content
    assert whole is not None
    assert json.loads(whole) == "👩‍👩‍👧 你好 e\u0301"
    with client.chat.completions.create(**fields, **more, stream=True) as stream:
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "�" not in "".join(pieces)
    assert "".join(pieces) == whole


def test_offsets_count_characters(client: openai.OpenAI) -> None:
    prompt = "é👩‍👧好"
    told = complete(client, prompt=prompt, max_tokens=0, echo=True, logprobs=0).choices[0].logprobs
    raw = prompt.encode()
    assert told.text_offset == [len(raw[:i].decode(errors="ignore")) for i in range(len(raw))]

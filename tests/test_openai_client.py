"""The real `openai` client against the real engine on `tiny`, over real HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import openai
import pytest
from serving import TINY, serving

from gateway.api.service import Service
from gateway.metrics import Metrics
from gateway.request import Served
from gateway.worker import Worker
from logs.recorder import Recorder

if TYPE_CHECKING:
    from tiny_pair import TinyPair

MESSAGES: Any = [{"role": "user", "content": "Say something."}]


@pytest.fixture(scope="module")
def url(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    metrics, recorder = Metrics(), Recorder(tmp_path_factory.mktemp("tape"))
    served = Served("tiny/small", "tiny/large", "a" * 16, "b" * 16, "cpu/float32/none", "test")
    worker = Worker(tiny_pair.engine(), served, [recorder, metrics])
    worker.start()
    service = Service(config=TINY, metrics=metrics, model_name="tiny", recorder=recorder, engine=worker)
    with serving(service) as url:
        yield url
    worker.stop()
    recorder.close()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def text(client: openai.OpenAI, **body: Any) -> str:
    """The text of a seeded completion."""
    more = {"model": "tiny", "prompt": "Hello", "max_tokens": 24, "seed": 7, **body}
    return str(client.completions.create(**more).choices[0].text)


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=20, seed=1)
    assert answer.choices[0].message.content
    assert answer._request_id == answer.id
    assert answer.usage is not None
    routing = answer.routing  # type: ignore[attr-defined]
    assert answer.usage.completion_tokens == routing["small_tokens"] + routing["large_tokens"]


def test_a_streamed_chat_says_the_same(client: openai.OpenAI) -> None:
    body: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 40, "seed": 3}
    whole = client.chat.completions.create(**body)
    with client.chat.completions.create(**body, stream=True) as stream:
        chunks = list(stream)
    assert whole.choices[0].message.content == "".join(c.choices[0].delta.content or "" for c in chunks)
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason


def test_exact_is_large_only_seed_by_seed(client: openai.OpenAI) -> None:
    for seed in range(5):
        large = text(client, seed=seed, extra_body={"routing": {"mode": "large_only"}})
        assert large == text(client, seed=seed)
        assert large == text(client, seed=seed, extra_body={"routing": {"draft_length": 1, "threshold": 0.1}})


def test_seeds_decide_and_repeat(client: openai.OpenAI) -> None:
    assert text(client, seed=1) == text(client, seed=1)
    assert len({text(client, seed=seed) for seed in range(5)}) == 5


def test_choices_differ_but_repeat(client: openai.OpenAI) -> None:
    def choices() -> list[str]:
        made = client.completions.create(model="tiny", prompt="Hello", n=4, max_tokens=24, seed=7)
        return [choice.text for choice in made.choices]

    assert len(set(choices())) == 4
    assert choices() == choices()


def test_temperature_zero_ignores_the_seed(client: openai.OpenAI) -> None:
    assert len({text(client, seed=seed, temperature=0) for seed in range(3)}) == 1


def test_max_and_min_tokens(client: openai.OpenAI) -> None:
    # The end of the text is made likely, so that answers end early unless something holds them.
    body: Any = {"model": "tiny", "prompt": "Hello", "seed": 5, "max_tokens": 40, "logit_bias": {"258": 9}}

    def ends(**more: Any) -> tuple[int, str]:
        answer = client.completions.create(**body, extra_body=more)
        assert answer.usage is not None
        return answer.usage.completion_tokens, answer.choices[0].finish_reason

    num_tokens, reason = ends()
    assert reason == "stop"
    assert num_tokens < 40
    assert ends(min_tokens=40) == (40, "length")
    assert ends(ignore_eos=True) == (40, "length")
    num_tokens, _ = ends(min_tokens=20)
    assert num_tokens >= 20


def test_a_bias_forces_and_forbids(client: openai.OpenAI) -> None:
    assert text(client, logit_bias={str(ord("x")): 100}) == "x" * 24
    plain = text(client, temperature=0)
    banned = text(client, temperature=0, logit_bias={str(ord(plain[0])): -100})
    assert plain[0] not in banned


def test_penalties_change_the_answer(client: openai.OpenAI) -> None:
    greedy = {"temperature": 0, "max_tokens": 48}
    plain = text(client, **greedy)
    strong = text(client, **greedy, presence_penalty=2, frequency_penalty=2)
    assert len(set(plain)) < len(set(strong))
    assert plain != text(client, **greedy, extra_body={"repetition_penalty": 2.0})


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 5e-324},
        {"temperature": 1e-4},
        {"top_p": 5e-324},
        {"extra_body": {"repetition_penalty": 0.01}},
        {"extra_body": {"repetition_penalty": 100}},
        {"extra_body": {"routing": {"small_repetition_penalty": 0.01, "protect_first": 0}}},
        {"logit_bias": {str(i): -100 for i in range(256)}},
        {"presence_penalty": 2, "frequency_penalty": -2},
    ],
)
def test_the_ends_of_the_ranges_are_served(client: openai.OpenAI, extreme: dict[str, Any]) -> None:
    assert client.completions.create(model="tiny", prompt="Hello", max_tokens=12, **extreme).choices


def test_top_k_one_is_greedy(client: openai.OpenAI) -> None:
    greedy = text(client, temperature=0)
    assert greedy == text(client, extra_body={"top_k": 1})
    assert greedy == text(client, top_p=1e-6)
    assert greedy == text(client, extra_body={"min_p": 1.0})


def test_stop_strings_and_stop_token_ids(client: openai.OpenAI) -> None:
    plain = text(client, temperature=0)
    stop = plain[5:7]
    cut = plain[: plain.index(stop)]
    assert cut == text(client, temperature=0, stop=stop)
    assert cut == text(client, temperature=0, stop=["never there", stop])
    assert cut + stop == text(
        client, temperature=0, stop=stop, extra_body={"include_stop_str_in_output": True}
    )
    by_id = text(client, temperature=0, extra_body={"stop_token_ids": [ord(plain[3])]})
    assert plain[: plain.index(plain[3])] == by_id


def test_logprobs_are_those_of_the_chosen_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="Hello", max_tokens=12, temperature=0, logprobs=3, seed=1
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.token_logprobs is not None
    for chosen, value, top in zip(
        logprobs.tokens or [], logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert len(top) == 3
        assert chosen == max(top, key=lambda token: top[token])
        assert value == top[chosen]


def test_echoed_logprobs_are_the_large_models_own(client: openai.OpenAI, tiny_pair: TinyPair) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    prompt = "Hello, world"
    model = AutoModelForCausalLM.from_pretrained(tiny_pair.folder / "large", dtype=torch.float32)
    ids = torch.tensor([list(prompt.encode())])
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(ids).logits[0], dim=-1)
    expected = [float(logprobs[i - 1, ids[0, i]]) for i in range(1, len(prompt))]
    for routing in ({}, {"accept": "trust", "protect_first": 0}, {"mode": "large_only"}):
        answer = client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=4,
            temperature=0,
            echo=True,
            logprobs=1,
            extra_body={"routing": routing},
        )
        told = answer.choices[0].logprobs
        assert told is not None
        assert told.token_logprobs is not None
        assert told.top_logprobs is not None
        assert told.token_logprobs[0] is None
        assert told.top_logprobs[0] is None
        assert told.token_logprobs[1 : len(prompt)] == pytest.approx(expected, abs=1e-4)
        assert told.text_offset == list(range(len(prompt) + 4))
        assert "".join(told.tokens or []) == answer.choices[0].text
        best = [max(logprobs[i].tolist()) for i in range(len(prompt) - 1)]
        assert [max(top.values()) for top in told.top_logprobs[1 : len(prompt)]] == pytest.approx(
            best, abs=1e-4
        )


def test_prompt_logprobs_in_several_prompts_at_once(client: openai.OpenAI) -> None:
    body: Any = {"model": "tiny", "max_tokens": 2, "seed": 1}
    together = client.completions.create(
        **body, prompt=["Hello", "Goodbye"], extra_body={"prompt_logprobs": 1}
    )
    for choice, prompt in zip(together.choices, ("Hello", "Goodbye"), strict=True):
        told = choice.prompt_logprobs  # type: ignore[attr-defined]
        assert told[0] is None
        assert [ord(c) for c in prompt[1:]] == [
            int(next(i for i in entry if entry[i]["decoded_token"] == c))
            for c, entry in zip(prompt[1:], told[1:], strict=True)
        ]
        assert all(any(item["rank"] == 1 for item in entry.values()) for entry in told[1:])
        alone = client.completions.create(**body, prompt=prompt, extra_body={"prompt_logprobs": 1})
        assert [None if e is None else sorted(e) for e in told] == [
            None if e is None else sorted(e)
            for e in alone.choices[0].prompt_logprobs  # type: ignore[attr-defined]
        ]


def test_chat_prompt_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=2, extra_body={"prompt_logprobs": 0}
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(answer.prompt_logprobs)  # type: ignore[attr-defined]


def test_echo_streams_its_logprobs_once(client: openai.OpenAI) -> None:
    body: Any = {"model": "tiny", "prompt": "Hello", "max_tokens": 6, "echo": True, "logprobs": 1, "seed": 3}
    whole = client.completions.create(**body).choices[0]
    with client.completions.create(**body, stream=True) as stream:
        chunks = [chunk.choices[0] for chunk in stream]
    assert whole.logprobs is not None
    assert "".join(c.text for c in chunks) == whole.text
    assert [t for c in chunks if c.logprobs for t in c.logprobs.tokens or []] == whole.logprobs.tokens
    assert [
        o for c in chunks if c.logprobs for o in c.logprobs.text_offset or []
    ] == whole.logprobs.text_offset


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def as_schema(client: openai.OpenAI, seed: int, routing: dict[str, Any]) -> str:
    """A seeded answer held to SCHEMA."""
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=150,
        seed=seed,
        # The grammar would let spaces go on and on.
        logit_bias={str(ord(c)): -100 for c in " \n\r\t"},
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
        extra_body={"routing": routing},
    )
    return answer.choices[0].message.content or ""


def test_a_schema_holds_whoever_writes(client: openai.OpenAI) -> None:
    large = as_schema(client, 0, {"mode": "large_only"})
    assert large == as_schema(client, 0, {"protect_first": 0}), "exact is large_only under a grammar too"
    for routing in ({}, {"accept": "trust", "protect_first": 0}, {"mode": "small_only"}):
        value = json.loads(as_schema(client, 0, routing))
        assert set(value) == {"name", "age"}
        assert value["age"] <= 99


def test_json_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=60, seed=1, response_format={"type": "json_object"}
    )
    content = answer.choices[0].message.content or ""
    assert content.lstrip()[0] == "{"
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(content), dict)


def test_async_requests_at_once(url: str) -> None:
    import asyncio

    async def many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            made = await asyncio.gather(
                *(
                    client.completions.create(model="tiny", prompt="Hello", max_tokens=24, seed=seed)
                    for seed in range(8)
                )
            )
        return [answer.choices[0].text for answer in made]

    together = asyncio.run(many())
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        assert [text(client, seed=seed) for seed in range(8)] == together


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"extra_body": {"foo": 1}}, "foo"),
        ({"extra_body": {"routing": {"fast": True}}}, "routing.fast"),
        ({"temperature": 5}, "temperature"),
        ({"suffix": "x"}, "suffix"),
    ],
)
def test_refusals_reach_the_client_by_name(client: openai.OpenAI, body: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x", **body)
    assert param == caught.value.param


def test_other_errors_have_their_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt="x")
    headers = {"x-request-id": "only-once"}
    client.completions.create(model="tiny", prompt="x", extra_headers=headers)
    with pytest.raises(openai.ConflictError):
        client.completions.create(model="tiny", prompt="x", extra_headers=headers)


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_recorded_decisions_replay(client: openai.OpenAI, url: str) -> None:
    import httpx

    text(client, extra_body={"routing": {"accept": "trust"}})
    report = httpx.get(f"{url}/v1/replay", trust_env=False).json()
    assert report["mismatches"] == 0, report["shown"]
    assert report["decisions"] > 0

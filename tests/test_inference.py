"""Completions and chats over real HTTP, from a worker that writes a known text."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_worker import ANSWER
from serving import TINY, FakeGateway, fake_gateway

from gateway.config import Config, ModelsConfig, ServerConfig
from gateway.core import Mode

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = {"model": "tiny", "prompt": "hi"}
TALK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
ROUTING_KEYS = {
    "policy", "policy_hash", "arm", "small_tokens", "large_tokens", "lookup_tokens", "protected_tokens",
    "deferral_rate", "num_drafts", "num_draft_tokens", "num_accepted_draft_tokens", "draft_acceptance_rate",
    "mean_acceptance_length", "guard_hits", "large_passes", "small_passes", "adapted", "degraded",
}  # fmt: skip


@pytest.fixture(scope="module")
def taped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGateway]:
    with fake_gateway(data_dir=tmp_path_factory.mktemp("tape")) as gateway:
        yield gateway


@pytest.fixture
def gateway(taped: FakeGateway) -> Iterator[FakeGateway]:
    taped.worker.hold, taped.worker.capacity = False, 1000
    yield taped
    taped.worker.hold = False


def spelled(num_tokens: int) -> str:
    """What the worker writes in so many tokens."""
    raw = ANSWER.encode()
    return bytes(raw[i % len(raw)] for i in range(num_tokens)).decode("utf-8", "replace")


def events(response: httpx.Response) -> list[Any]:
    """The JSON of every SSE event; the stream must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_completion(gateway: FakeGateway) -> None:
    response = gateway.post(COMPLETIONS, {**TEXT, "max_tokens": 9})
    body = response.json()
    assert (response.status_code, body["object"], body["model"]) == (200, "text_completion", "tiny")
    assert body["id"] == response.headers["x-request-id"]
    (choice,) = body["choices"]
    assert (spelled(9), "length", 0, None) == (
        choice["text"], choice["finish_reason"], choice["index"], choice["logprobs"],
    )  # fmt: skip
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 9, "total_tokens": 11}
    routing = body["routing"]
    assert set(routing) == ROUTING_KEYS
    assert routing["small_tokens"] + routing["large_tokens"] + routing["lookup_tokens"] == 9
    assert routing["large_tokens"] / 9 == routing["deferral_rate"]
    assert (routing["policy"], routing["arm"], routing["draft_acceptance_rate"]) == ("stable", "stable", None)


def test_a_chat(gateway: FakeGateway) -> None:
    body = gateway.post(CHAT, {**TALK, "max_tokens": 9}).json()
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert {"role": "assistant", "content": spelled(9), "refusal": None} == choice["message"]
    assert set(body["routing"]) == ROUTING_KEYS


@pytest.mark.parametrize("num_tokens", [1, 7, 30, 61])
def test_streamed_text_is_the_whole_text(gateway: FakeGateway, num_tokens: int) -> None:
    for path, base in ((COMPLETIONS, TEXT), (CHAT, TALK)):
        response = gateway.post(path, {**base, "max_tokens": num_tokens, "stream": True})
        assert "text/event-stream" in response.headers["content-type"]
        chunks = events(response)
        assert {response.headers["x-request-id"]} == {chunk["id"] for chunk in chunks}
        parts = [choice for chunk in chunks for choice in chunk["choices"]]
        text = "".join(p["text"] if path == COMPLETIONS else p["delta"].get("content", "") for p in parts)
        assert spelled(num_tokens) == text
        assert [p["finish_reason"] for p in parts if p["finish_reason"]] == ["length"]
        assert not any("usage" in chunk for chunk in chunks)


def test_a_chat_stream_begins_with_the_role(gateway: FakeGateway) -> None:
    chunks = events(gateway.post(CHAT, {**TALK, "max_tokens": 3, "stream": True}))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_routing_comes_with_the_finish_reason(gateway: FakeGateway) -> None:
    for path, base in ((COMPLETIONS, TEXT), (CHAT, TALK)):
        chunks = events(gateway.post(path, {**base, "max_tokens": 9, "stream": True}))
        (final,) = [c for c in chunks if "routing" in c]
        assert final["choices"][0]["finish_reason"] == "length"
        assert final["routing"]["small_tokens"] + final["routing"]["large_tokens"] == 9


def test_include_usage_adds_a_last_chunk(gateway: FakeGateway) -> None:
    body = {"max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
    for path, base in ((COMPLETIONS, TEXT), (CHAT, TALK)):
        *others, last = events(gateway.post(path, {**base, **body}))
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 9
        assert {None} == {chunk["usage"] for chunk in others}


def test_continuous_usage_grows(gateway: FakeGateway) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(
        gateway.post(COMPLETIONS, {**TEXT, "max_tokens": 9, "stream": True, "stream_options": options})
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert sorted(counts) == counts
    assert counts[-1] == 9


def test_choices_of_several_prompts(gateway: FakeGateway) -> None:
    body = gateway.post(
        COMPLETIONS, {**TEXT, "prompt": ["ab", "c"], "n": 2, "max_tokens": 4, "echo": True}
    ).json()
    assert [c["text"].removesuffix(spelled(4)) for c in body["choices"]] == ["ab", "ab", "c", "c"]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 16, "total_tokens": 19}
    assert body["routing"]["small_tokens"] + body["routing"]["large_tokens"] == 16


def test_streamed_choices_are_told_apart(gateway: FakeGateway) -> None:
    body = {**TEXT, "prompt": ["ab", "c"], "n": 2, "max_tokens": 4, "echo": True, "stream": True}
    texts = {0: "", 1: "", 2: "", 3: ""}
    for chunk in events(gateway.post(COMPLETIONS, body)):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert [f"{p}{spelled(4)}" for p in ("ab", "ab", "c", "c")] == list(texts.values())


def test_stop_strings_end_the_answer_before_them(gateway: FakeGateway) -> None:
    for stream in (False, True):
        response = gateway.post(COMPLETIONS, {**TEXT, "max_tokens": 40, "stop": ["好,"], "stream": stream})
        choices = (
            [c for e in events(response) for c in e["choices"]] if stream else response.json()["choices"]
        )
        assert ANSWER.split("好,")[0] == "".join(c["text"] for c in choices)
        assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "好,")
    kept = gateway.post(
        COMPLETIONS, {**TEXT, "max_tokens": 40, "stop": "好,", "include_stop_str_in_output": True}
    )
    assert kept.json()["choices"][0]["text"].endswith("好,")


def test_completion_logprobs(gateway: FakeGateway) -> None:
    (choice,) = gateway.post(COMPLETIONS, {**TEXT, "max_tokens": 8, "logprobs": 2}).json()["choices"]
    logprobs = choice["logprobs"]
    # "Zażó" is Z, a, two bytes, two bytes; then half of two more characters.
    assert (logprobs["tokens"]) == [
        "Z",
        "a",
        "bytes:\\xc5",
        "bytes:\\xbc",
        "bytes:\\xc3",
        "bytes:\\xb3",
        "bytes:\\xc5",
        "bytes:\\x82",
    ]
    assert logprobs["text_offset"] == [0, 1, 2, 2, 3, 3, 4, 4]
    assert logprobs["token_logprobs"] == [-0.25] * 8
    assert logprobs["top_logprobs"][0] == {"Z": -0.25, "A": -2.0}


def test_offsets_count_the_echoed_prompt(gateway: FakeGateway) -> None:
    with_echo = {**TEXT, "prompt": "żó", "max_tokens": 2, "echo": True}
    assert gateway.post(COMPLETIONS, with_echo).json()["choices"][0]["text"] == "żóZa"


def test_chat_logprobs_carry_bytes(gateway: FakeGateway) -> None:
    body = {**TALK, "max_tokens": 4, "logprobs": True, "top_logprobs": 1}
    whole = gateway.post(CHAT, body).json()["choices"][0]["logprobs"]["content"]
    assert ANSWER.encode()[:4] == bytes(byte for token in whole for byte in token["bytes"])
    assert [len(token["top_logprobs"]) for token in whole] == [1] * 4
    chunks = events(gateway.post(CHAT, {**body, "stream": True}))
    streamed = [t for c in chunks for p in c["choices"] if p["logprobs"] for t in p["logprobs"]["content"]]
    assert whole == streamed


def test_token_ids_on_request(gateway: FakeGateway) -> None:
    body = {**TEXT, "max_tokens": 4, "return_token_ids": True}
    (choice,) = gateway.post(COMPLETIONS, body).json()["choices"]
    assert (list(ANSWER.encode()[:4]), [104, 105]) == (choice["token_ids"], choice["prompt_token_ids"])
    chunks = [c for e in events(gateway.post(COMPLETIONS, {**body, "stream": True})) for c in e["choices"]]
    assert choice["token_ids"] == [i for c in chunks for i in c["token_ids"]]
    talk = gateway.post(CHAT, {**TALK, "max_tokens": 4, "return_token_ids": True}).json()
    assert choice["token_ids"] == talk["choices"][0]["token_ids"]
    assert (
        bytes(talk["prompt_token_ids"]) if max(talk["prompt_token_ids"]) < 256 else talk["prompt_token_ids"]
    )


def test_the_clients_id_is_the_trace_id(gateway: FakeGateway) -> None:
    headers = {"x-request-id": "my.id-1_A"}
    first = gateway.post(COMPLETIONS, TEXT, headers=headers)
    assert (first.json()["id"], first.headers["x-request-id"]) == ("my.id-1_A", "my.id-1_A")
    again = gateway.post(COMPLETIONS, TEXT, headers=headers)
    assert (
        again.status_code,
        again.headers["x-should-retry"],
        again.json()["error"]["param"],
    ) == (409, "false", "x-request-id")
    assert gateway.http.get("/v1/traces/my.id-1_A").json()["request_id"] == "my.id-1_A"


def test_an_id_clashes_with_one_on_the_tape(gateway: FakeGateway) -> None:
    gateway.post(COMPLETIONS, TEXT, headers={"x-request-id": "old-one"})
    gateway.service.recorder.flush()
    gateway.service.forget_ended()
    assert gateway.post(COMPLETIONS, TEXT, headers={"x-request-id": "old-one"}).status_code == 409


def test_an_id_of_ones_own_does_not_wait_for_the_tapes_writer(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(gateway.service.recorder, "flush", lambda timeout_s=5.0: waits.append(timeout_s))
    assert gateway.post(COMPLETIONS, TEXT, headers={"x-request-id": "mine"}).status_code == 200
    assert gateway.post(COMPLETIONS, TEXT, headers={"x-request-id": "mine"}).status_code == 409
    assert waits == []


@pytest.mark.parametrize("bad", ["a b", "é".encode("latin-1"), "x" * 129, ""])
def test_a_bad_id_is_refused(gateway: FakeGateway, bad: Any) -> None:
    response = gateway.post(COMPLETIONS, TEXT, headers={"x-request-id": bad})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-request-id")


def test_a_full_queue_is_429_with_retry_after(gateway: FakeGateway) -> None:
    gateway.worker.capacity = 1
    response = gateway.post(COMPLETIONS, {**TEXT, "n": 2}, headers={"x-request-id": "full-1"})
    gateway.worker.hold = False
    assert response.status_code == 200, "each choice ends before the next is taken"
    gateway.worker.hold = True
    response = gateway.post(COMPLETIONS, {**TEXT, "n": 2}, headers={"x-request-id": "full-2"})
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
    assert int(response.headers["retry-after"]) >= 1
    assert gateway.worker.jobs == {}, "the choice that fitted was let go again"


def test_a_broken_pass_is_500_and_an_event_in_a_stream(gateway: FakeGateway) -> None:
    gateway.worker.hold = True
    with gateway.http.stream(
        "POST", COMPLETIONS, json={**TEXT, "max_tokens": 50, "stream": True}
    ) as response:
        gateway.worker.wait_for(lambda: bool(gateway.worker.jobs))
        gateway.worker.advance(3)
        gateway.worker.fail("no memory")
        lines = [line.removeprefix("data: ") for line in response.read().decode().split("\n\n") if line]
    error = json.loads(lines[-1])["error"]
    assert (error["type"], error["code"]) == ("server_error", "engine_error")
    assert "no memory" in error["message"]


def test_a_client_who_leaves_a_stream_frees_the_slot(gateway: FakeGateway) -> None:
    gateway.worker.hold = True
    with gateway.http.stream(
        "POST", COMPLETIONS, json={**TEXT, "max_tokens": 50, "stream": True}
    ) as response:
        gateway.worker.wait_for(lambda: bool(gateway.worker.jobs))
        gateway.worker.advance(2)
        trace_id = response.headers["x-request-id"]
        next(response.iter_raw())
    assert gateway.worker.wait_for(lambda: trace_id in gateway.worker.cancelled)
    assert gateway.worker.wait_for(lambda: not gateway.worker.jobs)
    assert gateway.http.get(f"/v1/traces/{trace_id}").json()["finish_reason"] == "abort"


def test_a_client_who_leaves_before_the_answer_frees_the_slot(gateway: FakeGateway) -> None:
    gateway.worker.hold = True
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{gateway.url}{COMPLETIONS}", json=TEXT, timeout=0.3, headers={"x-request-id": "gone"})
    assert gateway.worker.wait_for(lambda: "gone" in gateway.worker.cancelled)
    assert gateway.worker.wait_for(lambda: not gateway.worker.jobs)


def short(**server: float) -> Config:
    return Config(models=TINY.models, server=ServerConfig(**server))


def test_a_silent_stream_is_kept_alive() -> None:
    with fake_gateway(short(keepalive_s=0.05)) as gateway:
        gateway.worker.hold = True
        body = {**TEXT, "max_tokens": 3, "stream": True}
        with gateway.http.stream("POST", COMPLETIONS, json=body) as response:
            lines = response.iter_lines()
            assert next(line for line in lines if line) == ": keep-alive"
            gateway.worker.advance(3)
            assert [line for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.parametrize("stream", [False, True])
def test_the_deadline_is_504(stream: bool) -> None:
    with fake_gateway(short(request_timeout_s=0.1)) as gateway:
        gateway.worker.hold = True
        response = gateway.post(COMPLETIONS, {**TEXT, "stream": stream})
        if stream:
            error = json.loads(response.text.removeprefix("data: "))["error"]
        else:
            assert response.status_code == 504
            error = response.json()["error"]
        assert (error["type"], error["code"]) == ("timeout_error", "deadline_exceeded")
        assert gateway.worker.wait_for(lambda: not gateway.worker.jobs)


def test_draining_refuses_new_requests_and_readiness() -> None:
    with fake_gateway() as gateway:
        assert gateway.http.get("/ready").status_code == 200
        gateway.service.draining = True
        assert gateway.http.get("/health").status_code == 200
        for response in (gateway.http.get("/ready"), gateway.post(COMPLETIONS, TEXT)):
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) >= 1
            assert "error" in response.json()


def test_loading_is_not_ready() -> None:
    with fake_gateway() as gateway:
        gateway.service.engine = None
        assert [
            gateway.http.get("/ready").status_code,
            gateway.post(COMPLETIONS, TEXT).status_code,
            gateway.http.get("/health").status_code,
        ] == [503, 503, 200]


def test_a_client_who_reads_nothing_is_dropped_and_holds_nobody_up() -> None:
    with fake_gateway(short(send_timeout_s=0.2), send_buffer=4096) as gateway:
        gateway.worker.max_model_len, gateway.worker.hold = 100_000, True
        body = {**TEXT, "max_tokens": 40_000, "stream": True, "return_token_ids": True}
        small = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)])
        with (
            httpx.Client(base_url=gateway.url, transport=small, timeout=10) as client,
            client.stream("POST", COMPLETIONS, json=body) as response,
        ):
            gateway.worker.wait_for(lambda: bool(gateway.worker.jobs))
            for _ in range(20):
                gateway.worker.advance(1_500)
            assert gateway.worker.wait_for(
                lambda: response.headers["x-request-id"] in gateway.worker.cancelled
            )
            gateway.worker.hold = False
            assert gateway.post(COMPLETIONS, TEXT).status_code == 200


def test_a_long_prompt_is_planned_beside_the_loop(gateway: FakeGateway) -> None:
    gateway.worker.max_model_len, before = 100_000, gateway.worker.max_model_len
    body = gateway.post(COMPLETIONS, {**TEXT, "prompt": "a" * 60_000, "max_tokens": 1}).json()
    gateway.worker.max_model_len = before
    assert body["usage"]["prompt_tokens"] == 60_000


def test_a_refused_request_may_come_again_with_its_id(gateway: FakeGateway) -> None:
    headers = {"x-request-id": "patient"}
    gateway.worker.num_waiting = 256
    assert gateway.post(COMPLETIONS, TEXT, headers=headers).json()["error"]["code"] == "queue_full"
    gateway.worker.num_waiting = 0
    assert gateway.post(COMPLETIONS, TEXT, headers=headers).status_code == 200


def test_a_share_is_shadowed_unless_the_client_says_how_to_route() -> None:
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 2}
    settings = Config(models=ModelsConfig(preset="tiny"), server=ServerConfig(shadow_rate=0.5))
    with fake_gateway(settings) as gateway:
        for _ in range(60):
            assert gateway.post("/v1/completions", body).status_code == 200
        modes = [request.policy.mode for request in gateway.worker.seen]
        assert 10 <= modes.count(Mode.SHADOW) <= 50
        assert set(modes) == {Mode.SHADOW, Mode.ROUTED}
        gateway.worker.seen.clear()
        for _ in range(20):
            gateway.post("/v1/completions", body | {"routing": {"threshold": 0.4}})
        assert {request.policy.mode for request in gateway.worker.seen} == {Mode.ROUTED}

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_worker import tiny_tokenizer

from gateway.api.plan import Arm, Limits, Origin, plan_completion
from gateway.api.plan_chat import plan_chat
from gateway.core import Accept, Kind, Mode
from gateway.policy import Policy
from gateway.request import Request
from gateway.wire import BodyError, CompletionRequest, decode
from gateway.wire_chat import ChatRequest

TOKENIZER = tiny_tokenizer()
POLICIES = {"stable": Policy(threshold=0.6), "careful": Policy(mode=Mode.LARGE_ONLY)}
ARM = Arm("stable", "stable", POLICIES["stable"])
LIMITS = Limits(max_model_len=64, max_choices=8)


def complete(**body: Any) -> tuple[Request, ...]:
    raw = json.dumps({"model": "m", "prompt": "hi", **body}).encode()
    origin = Origin("id-1", "/v1/completions", 5.0)
    return plan_completion(decode(raw, CompletionRequest), origin, ARM, POLICIES, TOKENIZER, LIMITS)


def chat(**body: Any) -> tuple[Request, ...]:
    raw = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **body}).encode()
    origin = Origin("id-1", "/v1/chat/completions", 5.0)
    return plan_chat(decode(raw, ChatRequest), origin, ARM, POLICIES, TOKENIZER, LIMITS)


def refused(call: Any, **body: Any) -> str | None:
    with pytest.raises(BodyError) as caught:
        call(**body)
    assert caught.value.param is not None
    assert caught.value.param.split("[")[0].split(".")[-1] in str(caught.value)
    return caught.value.param


def test_choices_are_numbered_prompt_by_prompt() -> None:
    requests = complete(prompt=["a", "bc"], n=3, seed=9)
    assert list(range(6)) == [r.choice for r in requests]
    assert [r.prompt_ids for r in requests] == [(97,)] * 3 + [(98, 99)] * 3
    assert {9} == {r.sampling.seed for r in requests}


@pytest.mark.parametrize("prompt", ["hi", ["hi"], [104, 105], [[104, 105]]])
def test_the_four_forms_of_a_prompt(prompt: Any) -> None:
    assert [r.prompt_ids for r in complete(prompt=prompt)] == [(104, 105)]


def test_defaults_are_the_contracts() -> None:
    (request,) = complete()
    sampling = request.sampling
    assert (
        sampling.max_tokens,
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.skip_special_tokens,
    ) == (16, 1.0, 1.0, 0, 0.0, 1.0, True)


def test_a_seed_is_drawn_and_differs() -> None:
    seeds = {complete()[0].sampling.seed for _ in range(5)}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_every_sampling_field_reaches_the_engine() -> None:
    (request,) = complete(
        max_tokens=9, min_tokens=2, temperature=0, top_p=0.5, top_k=3, min_p=0.1, stop=["x", "y"],
        stop_token_ids=[7], include_stop_str_in_output=True, ignore_eos=True, seed=-4, logit_bias={"65": -3},
        presence_penalty=0.1, frequency_penalty=0.2, repetition_penalty=1.3, skip_special_tokens=False,
    )  # fmt: skip
    s = request.sampling
    assert (s.max_tokens, s.min_tokens, s.temperature, s.top_p, s.top_k, s.min_p) == (9, 2, 0.0, 0.5, 3, 0.1)
    assert (
        s.stop, s.stop_token_ids, s.include_stop_str_in_output, s.ignore_eos, s.seed,
    ) == (("x", "y"), (7,), True, True, -4)  # fmt: skip
    assert (
        s.logit_bias, s.presence_penalty, s.frequency_penalty, s.repetition_penalty, s.skip_special_tokens,
    ) == (((65, -3.0),), 0.1, 0.2, 1.3, False)  # fmt: skip


def test_top_k_minus_one_means_all() -> None:
    assert complete(top_k=-1)[0].sampling.top_k == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"n": 9}, "n"),
        ({"prompt": ["a"] * 9}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [259]}, "prompt"),
        ({"prompt": "a" * 60}, "prompt"),
        ({"logit_bias": {"259": 1}}, "logit_bias"),
        ({"stop_token_ids": [259]}, "stop_token_ids"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"routing": {"policy": "none"}}, "routing.policy"),
        ({"routing": {"large_token_budget": 50}}, "routing.large_token_budget"),
        ({"routing": {"accept": "trust", "large_token_budget": 5}}, "routing.large_token_budget"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    assert param == refused(complete, **body)


def test_a_long_prompt_is_told_both_numbers() -> None:
    with pytest.raises(BodyError, match=r"60 prompt tokens .* 16 output tokens .* 64") as caught:
        complete(prompt="a" * 60)
    assert caught.value.code == "context_length_exceeded"


def test_routing_overrides_the_arms_policy() -> None:
    (request,) = complete(routing={"accept": "trust", "draft_length": 2})
    assert (
        request.policy_name,
        request.policy.threshold,
        request.policy.accept,
        request.policy.draft_length,
    ) == ("stable", 0.6, Accept.TRUST, 2)


def test_routing_names_another_policy() -> None:
    (request,) = complete(routing={"policy": "careful", "threshold": 0.1})
    assert (
        request.policy_name,
        request.policy.mode,
        request.policy.threshold,
    ) == ("careful", Mode.LARGE_ONLY, 0.1)


def test_audits_are_chosen_by_hash_at_their_rate() -> None:
    def audited(rate: float, name: str) -> bool:
        body = decode(b'{"model":"m","prompt":"x"}', CompletionRequest)
        arm = Arm("stable", "stable", Policy(audit_rate=rate))
        (request,) = plan_completion(body, Origin(name, "", 0.0), arm, {}, TOKENIZER, LIMITS)
        return request.audited

    names = [f"r{i}" for i in range(2000)]
    assert not any(audited(0.0, name) for name in names)
    assert all(audited(1.0, name) for name in names)
    assert 120 < sum(audited(0.1, name) for name in names) < 280
    assert [audited(0.5, name) for name in names] == [audited(0.5, name) for name in names]


def test_chat_goes_through_the_template() -> None:
    (request,) = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
        ]
    )
    same = TOKENIZER.chat([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}])
    assert tuple(same) == request.prompt_ids


def test_chat_may_fill_the_context() -> None:
    (request,) = chat()
    assert len(request.prompt_ids) + request.sampling.max_tokens == 64


def test_continue_final_message() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "He"}]
    (request,) = chat(messages=messages, continue_final_message=True)
    assert TOKENIZER.decode(request.prompt_ids)[-2:] == "He"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a" * 90}]}, "messages"),
    ],
)
def test_chat_refusals(body: dict[str, Any], param: str) -> None:
    assert param == refused(chat, **body)


@pytest.mark.parametrize(
    "name",
    ["chat_template", "tokenize", "sanitize_control_tokens", "messages", "tools", "kwargs"],
)
def test_template_variables_are_no_way_to_options_of_the_renderer(name: str) -> None:
    # A template of the client's own would be a loop of the client's own, run before anything is queued.
    assert refused(chat, chat_template_kwargs={"tone": "warm", name: "x"}) == f"chat_template_kwargs.{name}"


def test_logprobs_ask_for_enough_candidates() -> None:
    assert complete()[0].num_topk == 5
    assert complete(logprobs=20)[0].num_topk == 20
    assert chat(logprobs=True, top_logprobs=12)[0].num_topk == 12


def test_kinds_and_limits_that_are_the_large_models_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Policy(large_below=8, large_kinds=(Kind.REASONING,))
    monkeypatch.setitem(globals(), "ARM", Arm("stable", "stable", rule))
    monkeypatch.setitem(globals(), "LIMITS", Limits(256, 8))
    several = complete(prompt=["What is 2 + 2?", "A rhyme."], max_tokens=20)
    assert [(r.kind, r.policy.mode) for r in several] == [
        (Kind.REASONING, Mode.LARGE_ONLY),
        (Kind.OTHER, Mode.ROUTED),
    ]
    assert [r.policy.mode for r in complete(max_tokens=7)] == [Mode.LARGE_ONLY]
    # Token ids are read as the words they stand for.
    (ids,) = complete(prompt=list(b"2 + 2"), max_tokens=20)
    assert (ids.kind, ids.policy.mode) == (Kind.REASONING, Mode.LARGE_ONLY)
    # A client's own mode stands, its other keys do not hold the rule up.
    (asked,) = complete(prompt="2 + 2", max_tokens=20, routing={"mode": "routed"})
    (tuned,) = complete(prompt="2 + 2", max_tokens=20, routing={"threshold": 0.2})
    assert (asked.policy.mode, tuned.policy.mode) == (Mode.ROUTED, Mode.LARGE_ONLY)
    # Of a chat, the last thing the user said.
    turns = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]
    last = {"role": "user", "content": [{"type": "text", "text": "Thanks"}]}
    (said,) = chat(messages=[*turns, last], max_tokens=20)
    assert (said.kind, said.policy.mode) == (Kind.OTHER, Mode.ROUTED)
    (said,) = chat(messages=turns, max_tokens=20)
    assert said.kind is Kind.REASONING

"""How engines are asked and read: against answers recorded from vLLM 0.32 (CPU build), serving `tiny`'s large
model, and the documented shapes of SGLang and llama-server."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.core import Sampling
from gateway.engines.completions import Completions
from gateway.engines.query import Dialect, Malformed, Query
from gateway.engines.sglang import Sglang
from gateway.engines.vllm import CachedRows, Generate

RECORDED = Path(__file__).parent / "data" / "engines"
VOCAB = 259
PREFIX = tuple(b"the cat sat on the mat and the")
DRAFT = tuple(b" st")
GREEDY = Sampling(max_tokens=1, seed=7, temperature=0.0)
WARM = replace(GREEDY, temperature=0.7, top_p=0.9, top_k=40, min_p=0.05)


def query(sampling: Sampling = GREEDY, draft: tuple[int, ...] = DRAFT, position: int = 4) -> Query:
    return Query(
        prefix=PREFIX,
        draft=draft,
        sampling=sampling,
        choice=1,
        position=position,
        num_topk=3,
        deadline=math.inf,
        request_id="r",
        affinity="r",
    )


def recorded(name: str) -> Any:
    return json.loads((RECORDED / f"{name}.json").read_text())


# What the model said, read off the recording by hand: own tokens, their logprobs, those of " st".
OWN = [107, 112, 33, 32]
OWN_LOGPROBS = [-0.04585975036025047, -0.21760867536067963, -0.037415433675050735, -0.001989648910239339]
DRAFTED = [-31.297706604003906, -26.593477249145508, -7.396822929382324]


def test_vllm_lists_one_prompt_a_position() -> None:
    (call,) = Completions("m", VOCAB).calls(query())
    assert call.path == "/v1/completions"
    assert call.body["prompt"] == [[*PREFIX, *DRAFT[:i]] for i in range(4)]
    assert (call.body["max_tokens"], call.body["temperature"], call.body["logprobs"]) == (1, 0.0, 3)


def test_samples_are_drawn_one_call_a_position_each_with_a_seed_of_its_position() -> None:
    calls = Completions("m", VOCAB).calls(query(WARM))
    assert [c.body["prompt"] for c in calls] == [[*PREFIX, *DRAFT[:i]] for i in range(4)]
    assert {(c.body["temperature"], c.body["top_p"], c.body["top_k"], c.body["min_p"]) for c in calls} == {
        (0.7, 0.9, 40, 0.05)
    }
    seeds = [c.body["seed"] for c in calls]
    assert len(set(seeds)) == 4
    # The same output position has the same seed, however much was drafted before it.
    later = Completions("m", VOCAB).calls(query(WARM, draft=DRAFT[:1], position=6))
    assert [c.body["seed"] for c in later] == seeds[2:]


def test_both_of_vllms_ways_read_the_same_from_what_it_answered() -> None:
    documented = Completions("tiny", VOCAB)
    listed = documented.readings(query(), [recorded("vllm-completions")])
    whole = Generate(documented).readings(query(), [recorded("vllm-generate")])
    for readings in (listed, whole):
        assert [r.token for r in readings] == OWN
        assert [math.log(r.p_token or 0) for r in readings] == pytest.approx(OWN_LOGPROBS, abs=1e-6)
        assert readings[0].topk.ids == (107, 123, 102)
        assert readings[0].signals.gap == pytest.approx(math.exp(-0.04585975) - math.exp(-3.54285383))
    # prompt_logprobs tell of the draft itself; among the top three it is not.
    assert [math.log(r.p_draft or 0) for r in whole[:3]] == pytest.approx(DRAFTED, abs=1e-6)
    assert [r.p_draft for r in listed] == [None] * 4
    assert [r.allowed for r in whole] == [True, True, True, False]


def test_rows_of_cached_positions_are_never_read() -> None:
    answer = recorded("vllm-generate")
    answer["usage"]["prompt_tokens_details"]["cached_tokens"] = len(PREFIX) - 1
    assert [r.token for r in Generate(Completions("m", VOCAB)).readings(query(), [answer])] == OWN
    answer["usage"]["prompt_tokens_details"]["cached_tokens"] = len(PREFIX)
    with pytest.raises(CachedRows):
        Generate(Completions("m", VOCAB)).readings(query(), [answer])
    # A server that does not say how much it had cached may be making the rows up.
    answer["usage"]["prompt_tokens_details"] = None
    with pytest.raises(Malformed):
        Generate(Completions("m", VOCAB)).readings(query(), [answer])


def test_vllms_faster_way_is_greedy_and_for_drafts_only() -> None:
    fast = Generate(Completions("m", VOCAB))
    (call,) = fast.calls(query())
    assert call.path == "/inference/v1/generate"
    assert call.body["token_ids"] == [*PREFIX, *DRAFT]
    told = call.body["sampling_params"]
    assert (told["prompt_logprobs"], told["skip_reading_prefix_cache"], told["detokenize"]) == (
        3,
        False,
        False,
    )
    assert {c.path for c in fast.calls(query(WARM))} == {"/v1/completions"}
    assert {c.path for c in fast.calls(query(draft=()))} == {"/v1/completions"}


SGLANG = {
    "text": " ",
    "output_ids": [32],
    "meta_info": {
        "prompt_tokens": 33,
        "cached_tokens": 29,
        "input_token_logprobs": [[None, 101, None], [-31.3, 32, None], [-26.6, 115, None], [-7.4, 116, None]],
        "input_top_logprobs": [
            None,
            [[-0.05, 107, None], [-3.5, 123, None], [-4.9, 102, None]],
            [[-0.22, 112, None], [-2.0, 123, None], [-3.1, 101, None]],
            [[-0.04, 33, None], [-4.3, 66, None], [-4.6, 101, None]],
        ],
        "output_token_logprobs": [[-0.002, 32, None]],
        "output_top_logprobs": [[[-0.002, 32, None], [-7.2, 87, None], [-7.8, 44, None]]],
    },
}


def test_sglang_scores_from_the_last_prefix_token_and_skips_the_null_entry() -> None:
    (call,) = Sglang(VOCAB).calls(query())
    assert (call.path, call.body["input_ids"]) == ("/generate", [*PREFIX, *DRAFT])
    assert (call.body["logprob_start_len"], call.body["top_logprobs_num"]) == (len(PREFIX) - 1, 3)
    assert call.body["sampling_params"]["max_new_tokens"] == 1
    readings = Sglang(VOCAB).readings(query(), [SGLANG])
    assert [r.token for r in readings] == OWN
    assert [math.log(r.p_draft or 0) for r in readings[:3]] == pytest.approx([-31.3, -26.6, -7.4])
    assert readings[3].topk.ids == (32, 87, 44)


def test_sglang_samples_in_one_call_and_takes_the_logprobs_from_another() -> None:
    score, sample = Sglang(VOCAB).calls(query(WARM))
    assert score.body["sampling_params"]["temperature"] == 0.0
    assert sample.body["input_ids"] == [[*PREFIX, *DRAFT[:i]] for i in range(4)]
    assert [p["temperature"] for p in sample.body["sampling_params"]] == [0.7] * 4
    assert len({p["sampling_seed"] for p in sample.body["sampling_params"]}) == 4
    drawn = [{"output_ids": [t]} for t in (123, 200, 33, 32)]
    readings = Sglang(VOCAB).readings(query(WARM), [SGLANG, drawn])
    assert [r.token for r in readings] == [123, 200, 33, 32]
    assert readings[0].p_token == pytest.approx(math.exp(-3.5))
    assert readings[1].p_token is None


LLAMA_SERVER = {
    "choices": [
        {
            "index": 0,
            "text": "k",
            "logprobs": {
                "content": [
                    {
                        "id": 107,
                        "token": "k",
                        "bytes": [107],
                        "logprob": -0.05,
                        "top_logprobs": [
                            {"id": 107, "token": "k", "bytes": [107], "logprob": -0.05},
                            {"id": 123, "token": "{", "bytes": [123], "logprob": -3.5},
                        ],
                    }
                ]
            },
        }
    ]
}


def test_llama_server_names_tokens_by_id_in_chats_form() -> None:
    (reading,) = Completions("m", VOCAB).readings(query(draft=()), [LLAMA_SERVER])
    assert (reading.token, reading.topk.ids) == (107, (107, 123))


def text_only(token: str, top: dict[str, float]) -> Any:
    told = {"tokens": [token], "token_logprobs": [top[token]], "top_logprobs": [top]}
    return {"choices": [{"index": 0, "text": token, "logprobs": told}]}


def test_a_server_that_knows_texts_only_is_read_by_texts_that_one_token_alone_has() -> None:
    dialect = Completions("m", VOCAB, names={"a": 97, "b": 98})
    top = {"a": -0.1, "b": -2.5, "\ufffd": -6.0}
    (reading,) = dialect.readings(query(draft=()), [text_only("a", top)])
    assert (reading.token, reading.topk.ids) == (97, (97, 98))
    with pytest.raises(Malformed, match="could be several"):
        dialect.readings(query(draft=()), [text_only("\ufffd", top)])


def named(ids: dict[str, float], token: str) -> Any:
    return text_only(token, ids)


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": []},
        {"choices": [{"index": 0, "text": "k", "logprobs": None}]},
        named({"token_id:900": -0.1, "token_id:3": -1.0}, "token_id:900"),
        named({"token_id:9": math.nan, "token_id:3": -1.0}, "token_id:9"),
        named({"token_id:9": 0.7, "token_id:3": -1.0}, "token_id:9"),
        named({"token_id:9": -0.7}, "token_id:9"),
        named({"token_id:x": -0.7, "token_id:3": -1.0}, "token_id:x"),
    ],
    ids=[
        "empty",
        "no choices",
        "no logprobs",
        "beyond the vocabulary",
        "nan",
        "p > 1",
        "one only",
        "no number",
    ],
)
@pytest.mark.parametrize(
    "dialect", [Completions("m", VOCAB), Sglang(VOCAB), Generate(Completions("m", VOCAB))]
)
def test_an_answer_that_is_not_one_is_malformed_never_a_token(answer: Any, dialect: Dialect) -> None:
    with pytest.raises(Malformed):
        dialect.readings(query(draft=()), [answer])
    with pytest.raises(Malformed):
        dialect.readings(query(), [answer])


@pytest.mark.parametrize(
    ("draft", "sampling", "allowed"),
    [
        (33, GREEDY, True),
        (66, WARM, False),  # exp((-4.3 + 0.04) / 0.7) is below min_p
        (66, replace(WARM, min_p=0.001), True),
        (66, replace(WARM, min_p=0.0, top_k=1), False),
        (66, replace(WARM, min_p=0.0, top_k=2), True),
        (101, replace(WARM, min_p=0.0, top_k=2), False),
        (99, GREEDY, False),  # not among the top: unknown, so not taken
    ],
)
def test_a_drafts_standing_follows_top_k_and_min_p(draft: int, sampling: Sampling, allowed: bool) -> None:
    top = {"token_id:33": -0.04, "token_id:66": -4.3, "token_id:101": -4.6}
    asked = query(sampling, draft=(draft,))
    answers = [named(top, "token_id:33")] * 2
    if sampling.temperature == 0:
        both = [answers[0]["choices"][0], {**answers[0]["choices"][0], "index": 1}]
        answers = [{"choices": both}]
    first, _ = Completions("m", VOCAB).readings(asked, answers)
    assert first.allowed is allowed

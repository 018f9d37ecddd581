"""The default pair behind the real command, through the real client: what the README promises of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from process import Serving

from gateway import cli

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

PROMPTS = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
]
CONFIG = """
[engine]
# Draft caps follow the machine's pace and remembered answers the order of requests: without both, routes are
# a fixed function of each prompt.
adapt = false
lookup_history_tokens = 0
max_model_len = 2048
"""


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("pair")
    config = folder / "tokentape.toml"
    config.write_text(CONFIG)
    with Serving(folder / "data", "--config", str(config), preset="qwen-coder", timeout_s=900) as process:
        yield process
    assert process.process.returncode == 0


@pytest.fixture(scope="module")
def client(serving: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0, timeout=900) as client:
        yield client


@pytest.fixture(scope="module")
def answers(client: openai.OpenAI) -> list[Any]:
    """Every prompt of tests/data under the default policy, 128 greedy tokens, all at once."""

    def ask(prompt: dict[str, Any]) -> Any:
        return client.chat.completions.create(
            model="qwen-coder", messages=prompt["messages"], max_tokens=128, temperature=0
        )

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(ask, PROMPTS))


def columns(serving: Serving, trace_id: str) -> dict[str, list[Any]]:
    """A trace's steps."""
    answer = httpx.get(f"{serving.url}/v1/traces/{trace_id}/steps", timeout=60, trust_env=False)
    found: dict[str, list[Any]] = answer.json()["columns"]
    return found


def test_more_than_half_is_not_written_by_the_large_model_and_all_of_it_is_its_choice(
    serving: Serving, answers: list[Any]
) -> None:
    assert [answer.usage.completion_tokens for answer in answers] == [128] * 20
    cheap = sum(a.routing["small_tokens"] + a.routing["lookup_tokens"] for a in answers)
    share = cheap / sum(answer.usage.completion_tokens for answer in answers)
    agreeing = labelled = 0
    for answer in answers:
        found = columns(serving, answer.id)
        for tier, outcome, token, large in zip(
            found["tier"], found["outcome"], found["token_id"], found["large_choice"], strict=True
        ):
            if tier != "large" and outcome not in ("rejected", "discarded"):
                labelled += 1
                agreeing += token == large
    assert labelled == cheap
    assert share >= 0.55, f"{cheap} tokens"
    assert agreeing / labelled >= 0.97


def test_every_output_position_carries_the_small_models_signals(serving: Serving, answers: list[Any]) -> None:
    found = columns(serving, answers[0].id)
    for gap, outcome in zip(found["gap"], found["outcome"], strict=True):
        assert gap is not None or outcome in ("rejected", "discarded")


def test_exact_is_what_the_large_model_alone_writes(client: openai.OpenAI, answers: list[Any]) -> None:
    for prompt, answer in list(zip(PROMPTS, answers, strict=True))[::7]:
        alone = client.chat.completions.create(
            model="qwen-coder",
            messages=prompt["messages"],
            max_tokens=128,
            temperature=0,
            extra_body={"routing": {"mode": "large_only"}},
        )
        assert alone.choices[0].message.content == answer.choices[0].message.content


def test_a_streamed_answer_is_sensible(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="qwen-coder",
        messages=[{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
        max_tokens=40,
        temperature=0,
        stream=True,
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert "Paris" in text


def test_the_ui_is_there_and_every_decision_replays(
    serving: Serving, answers: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert httpx.get(f"http://127.0.0.1:{serving.ui_port}", trust_env=False).status_code == 200
    assert cli.main(["replay", "--all", "--url", serving.url]) == 0
    decisions, mismatches = capsys.readouterr().out.split("\n")[-2].split(", ")
    assert int(decisions.split()[0]) >= 20 * 100
    assert mismatches == "0 mismatches"


def test_it_is_ready_in_reasonable_time(serving: Serving) -> None:
    """About a minute with models and kernels cached; a first start also compiles on a busy machine."""
    assert serving.seconds < 300

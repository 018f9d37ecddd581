"""A second tokentape on `tiny` as the large model elsewhere, over real HTTP, with faults between the two."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch
from fault_proxy import FaultProxy, proxied
from openai_gateway import Gateway, serve_tiny
from serving import serving
from transformers import AutoModelForCausalLM

from gateway.api.service import Service
from gateway.config import Config, ConfigError, EngineConfig, ModelsConfig, RemoteConfig
from gateway.loading import load_worker
from gateway.metrics import Metrics
from gateway.recorded import COLUMNS
from gateway.replay import replay_all
from gateway.worker import Worker
from logs.recorder import Recorder

if TYPE_CHECKING:
    from tiny_pair import TinyPair

PROMPT = [int(byte) for byte in b"Once upon a time there was"]
EXACT = {"accept": "exact", "protect_first": 2, "threshold": 0.1, "draft_length": 4}
QUICK = {"timeout_s": 20.0, "failures": 3, "pause_s": 0.05, "max_in_flight": 8}


@pytest.fixture(scope="module")
def remote(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, str]]:
    """The gateway that serves the large model, and its URL."""
    with serve_tiny(tiny_pair, tmp_path_factory.mktemp("remote")) as far, far.serving() as url:
        yield far, url


@dataclass
class Near:
    """The gateway under test: its worker, tape, metrics and an HTTP client."""

    worker: Worker
    recorder: Recorder
    metrics: Metrics
    http: httpx.Client

    def complete(self, **fields: Any) -> httpx.Response:
        body = {
            "model": "tiny",
            "prompt": PROMPT,
            "max_tokens": 24,
            "temperature": 0,
            "return_token_ids": True,
        }
        return self.http.post("/v1/completions", json={**body, **fields})

    def trace(self, request_id: str) -> dict[str, Any]:
        assert self.worker.settle()
        self.recorder.flush()
        trace = self.recorder.reader().trace(request_id)
        assert trace is not None
        return trace

    def steps(self, request_id: str) -> list[dict[str, Any]]:
        self.trace(request_id)
        rows: list[dict[str, Any]] = self.recorder.reader().steps(request_id).to_pylist()
        return rows

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"tokentape:{name}"))


@contextmanager
def near(pair: TinyPair, url: str, data_dir: Path, **remote: Any) -> Iterator[Near]:
    """A gateway with the small model here and the large one at `url`."""
    config = Config(
        models=ModelsConfig(small=str(pair.folder / "small"), dtype="float32", small_quantize="none"),
        remote=RemoteConfig(engine="openai", base_url=url, model="tiny", **{**QUICK, **remote}),
        engine=EngineConfig(max_model_len=256, max_rows=16, adapt=False, kv_memory_gib=0.05),
    )
    recorder, metrics = Recorder(data_dir), Metrics()
    with closing(recorder):
        worker = load_worker(config, [recorder, metrics])
        (large,) = worker.distant
        with closing(large):
            metrics.watch_large(large)
            service = Service(
                config=config,
                metrics=metrics,
                model_name=config.served_name,
                recorder=recorder,
                engine=worker,
            )
            with (
                serving(service) as here,
                httpx.Client(base_url=here, timeout=30, trust_env=False, verify=False) as http,
            ):
                yield Near(worker, recorder, metrics, http)
            worker.stop()


@pytest.fixture(scope="module")
def gateway(
    tiny_pair: TinyPair, remote: tuple[Gateway, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Near]:
    """One that nothing goes wrong with."""
    with near(tiny_pair, remote[1], tmp_path_factory.mktemp("near")) as made:
        yield made


@pytest.fixture(scope="module")
def large(tiny_pair: TinyPair) -> Callable[[list[int]], torch.Tensor]:
    """The large model's own logits behind a text, from transformers."""
    model = AutoModelForCausalLM.from_pretrained(tiny_pair.folder / "large", dtype=torch.float32)

    @cache
    def known(ids: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0, -1]

    return lambda ids: known(tuple(ids))


def greedy(large: Callable[[list[int]], torch.Tensor], prompt: list[int], num: int) -> list[int]:
    text = list(prompt)
    for _ in range(num):
        text.append(int(large(text).argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("draft_length", [1, 4, 16])
def test_greedy_exact_is_the_large_models_own_text_token_for_token(
    gateway: Near, large: Callable[[list[int]], torch.Tensor], draft_length: int
) -> None:
    for prompt in (PROMPT, PROMPT[5:], [72, 105]):
        answer = gateway.complete(
            prompt=prompt, ignore_eos=True, max_tokens=24, routing={**EXACT, "draft_length": draft_length}
        ).json()
        assert answer["choices"][0]["token_ids"] == greedy(large, prompt, 24)
        routing = answer["routing"]
        assert routing["num_accepted_draft_tokens"] > 0
        assert (routing["degraded"], routing["large_passes"] < 24) == (False, True)
        steps = gateway.steps(answer["id"])
        # What the engine says, and what the small model says, is on every row of the output.
        assert all(row["gap"] is not None for row in steps if row["outcome"] not in ("rejected", "discarded"))
        assert all(row["large_choice"] is not None for row in steps if row["outcome"] != "discarded")


def test_many_rows_at_once_are_each_exact_and_replay(
    gateway: Near, large: Callable[[list[int]], torch.Tensor]
) -> None:
    prompts = [PROMPT[i:] for i in range(8)]
    answer = gateway.complete(prompt=prompts, ignore_eos=True, routing=EXACT).json()
    assert [c["token_ids"] for c in answer["choices"]] == [greedy(large, p, 24) for p in prompts]
    gateway.trace(answer["id"])
    results = list(replay_all(gateway.recorder.reader().every_choice(COLUMNS)))
    assert sum(r.decisions for r in results) > 100
    assert [m for r in results for m in r.mismatches] == []


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_sampled_exact_has_the_large_models_distribution(
    gateway: Near, large: Callable[[list[int]], torch.Tensor]
) -> None:
    """Chi-square over pairs of tokens, so that neighbours that share their noise would show."""
    n, batch = 288, 16
    seen: Counter[tuple[int, int]] = Counter()
    prompt = PROMPT[:6]
    for i in range(n // batch):
        answer = gateway.complete(
            prompt=prompt, n=batch, max_tokens=2, temperature=2.0, ignore_eos=True, seed=i,
            routing={"accept": "exact", "protect_first": 0, "threshold": 0.0, "draft_length": 1},
        )  # fmt: skip
        seen.update(tuple(c["token_ids"]) for c in answer.json()["choices"])
    first = torch.softmax(large(prompt).double() / 2, -1)
    expected: dict[tuple[int, int], float] = {}
    for a in first.topk(4).indices.tolist():
        second = torch.softmax(large([*prompt, a]).double() / 2, -1)
        for b in second.topk(4).indices.tolist():
            expected[a, b] = n * float(first[a] * second[b])
    cells = {pair: e for pair, e in expected.items() if e >= 5}
    rest = n - sum(cells.values())
    statistic = sum((seen[pair] - e) ** 2 / e for pair, e in cells.items())
    statistic += (n - sum(seen[pair] for pair in cells) - rest) ** 2 / rest
    assert len(cells) >= 4
    degrees = len(cells)
    # Wilson and Hilferty's approximation of the 1 - 1e-4 quantile.
    limit = degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3
    assert statistic < limit


def test_a_seed_gives_the_same_text_whatever_was_drafted(gateway: Near) -> None:
    def said(**routing: Any) -> list[int]:
        answer = gateway.complete(temperature=1.0, seed=5, ignore_eos=True, routing=routing).json()
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    alone = said(mode="large_only")
    assert said(**EXACT) == said(**{**EXACT, "draft_length": 1, "threshold": 0.6}) == alone
    assert len(set(alone)) > 3


@pytest.mark.parametrize(
    ("accept", "more"), [("threshold", {"accept_threshold": 0.3}), ("token_v3", {"alpha": 0.5})]
)
def test_lossy_rules_keep_what_the_large_model_says_they_may(
    gateway: Near, large: Callable[[list[int]], torch.Tensor], accept: str, more: dict[str, float]
) -> None:
    routing = {"accept": accept, "protect_first": 0, "threshold": 0.0, **more}
    answer = gateway.complete(routing=routing, ignore_eos=True, max_tokens=60).json()
    text = list(PROMPT)
    verdicts = Counter()
    for row in gateway.steps(answer["id"]):
        if row["outcome"] in ("accepted", "rejected"):
            p = torch.softmax(large(text), -1)
            x = row["token_id"]
            bar = more["accept_threshold"] if accept == "threshold" else (1 - more["alpha"]) * float(p.max())
            keeps = float(p[x]) >= bar or x == int(p.argmax())
            assert (row["outcome"] == "accepted") == keeps
            verdicts[row["outcome"], x == int(p.argmax())] += 1
        if row["outcome"] not in ("rejected", "discarded"):
            text.append(row["token_id"])
    assert verdicts["accepted", True] > 10
    assert verdicts["rejected", False] > 0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"logit_bias": {"65": 1}}, "logit_bias"),
    ({"min_tokens": 3}, "min_tokens"),
    ({"echo": True, "logprobs": 1}, "prompt_logprobs"),
    ({"routing": {"accept": "typical"}}, "routing.accept"),
    ({"routing": {"accept": "threshold", "accept_threshold": 0.1}}, "routing.accept_threshold"),
    ({"routing": {"accept": "token_v3"}, "temperature": 0.7, "top_p": 0.9}, "top_p"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[param for _, param in REFUSED])
def test_what_top_logprobs_cannot_give_is_refused_by_name(
    gateway: Near, fields: dict[str, Any], param: str
) -> None:
    answer = gateway.complete(**fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    # The small model alone can do it all.
    alone = {**fields, "routing": {"mode": "small_only"}}
    if "echo" not in fields:
        assert gateway.complete(**alone).status_code == 200


def test_every_call_is_a_pass_of_the_tape_and_the_clients_stream_is_whole(gateway: Near) -> None:
    with gateway.http.stream(
        "POST",
        "/v1/completions",
        json={"model": "tiny", "prompt": PROMPT, "max_tokens": 20, "temperature": 0, "stream": True},
    ) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    routing = next(c["routing"] for c in chunks if "routing" in c)
    assert routing["large_passes"] > 0
    passes = {row["pass_id"] for row in gateway.steps(chunks[0]["id"]) if row["tier"] == "large"}
    assert len(passes) == routing["large_passes"]


# ---- what goes wrong


@pytest.fixture
def proxy(remote: tuple[Gateway, str]) -> Iterator[tuple[FaultProxy, str]]:
    with proxied(remote[1]) as made:
        yield made


def once(times: int, answer: tuple[int, dict[str, str], bytes] | None) -> Callable[[str, bytes], Any]:
    """Spoil the first answers, then none."""
    left = [times]

    def spoil(path: str, real: bytes) -> Any:
        if path != "/v1/completions" or left[0] == 0:
            return 200, {}, real
        left[0] -= 1
        return answer

    return spoil


@pytest.mark.parametrize(
    "answer",
    [
        (500, {}, b"{}"),
        (503, {"retry-after": "0.05"}, b"{}"),
        (429, {"retry-after": "0.05"}, b"{}"),
        (200, {}, b"<html>"),
        (200, {}, b'{"choices": []}'),
        None,
    ],
    ids=["500", "503", "429", "no json", "no choices", "connection lost"],
)
def test_a_fault_that_passes_is_not_seen_by_the_client(
    tiny_pair: TinyPair,
    proxy: tuple[FaultProxy, str],
    large: Callable[[list[int]], torch.Tensor],
    tmp_path: Path,
    answer: tuple[int, dict[str, str], bytes] | None,
) -> None:
    faults, url = proxy
    with near(tiny_pair, url, tmp_path) as gateway:
        faults.spoil = once(2, answer)
        told = gateway.complete(ignore_eos=True, routing=EXACT).json()
        assert told["choices"][0]["token_ids"] == greedy(large, PROMPT, 24)
        # Two tries failed; the tape counts calls, not tries.
        passes = told["routing"]["large_passes"]
        assert gateway.metric('large_calls_total{outcome="ok"}') == passes
        assert gateway.metric("large_calls_total") == passes + 2


def wait_for(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        threading.Event().wait(0.02)


def test_an_engine_that_is_gone_fails_requests_fast_and_is_found_again(
    tiny_pair: TinyPair, proxy: tuple[FaultProxy, str], tmp_path: Path
) -> None:
    faults, url = proxy
    with near(tiny_pair, url, tmp_path) as gateway:
        faults.refuse = (502, {})
        began = time.monotonic()
        answer = gateway.complete(routing=EXACT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "large_model_unavailable")
        assert int(answer.headers["retry-after"]) >= 1
        assert time.monotonic() - began < 10
        assert gateway.metric("large_available") == 0
        assert gateway.complete(routing=EXACT).status_code == 503
        assert gateway.complete(routing={"mode": "small_only"}).status_code == 200
        trace = gateway.trace(answer.headers["x-request-id"])
        assert trace["finish_reason"] == "error"
        faults.refuse = None
        wait_for(lambda: gateway.metric("large_available") == 1)
        assert gateway.complete(routing=EXACT).status_code == 200


def test_degrading_is_flagged_everywhere_and_the_answer_has_its_length(
    tiny_pair: TinyPair, proxy: tuple[FaultProxy, str], tmp_path: Path
) -> None:
    faults, url = proxy
    with near(tiny_pair, url, tmp_path, on_large_failure="degrade") as gateway:
        fine = gateway.complete(routing=EXACT, ignore_eos=True).json()
        assert fine["routing"]["degraded"] is False
        faults.refuse = (502, {})
        answer = gateway.complete(routing=EXACT, ignore_eos=True).json()
        assert (answer["routing"]["degraded"], answer["routing"]["small_tokens"]) == (True, 24)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert {row["reason"] for row in gateway.steps(answer["id"])} == {"degraded"}
        assert gateway.metric("requests_degraded_total") == 1
        # What needs the large model has no other way.
        assert gateway.complete(routing={"mode": "large_only"}).status_code == 503
        results = list(replay_all(gateway.recorder.reader().every_choice(COLUMNS)))
        assert [m for r in results for m in r.mismatches] == []


def test_a_partial_answer_is_kept_when_the_engine_goes_away_in_its_middle(
    tiny_pair: TinyPair, proxy: tuple[FaultProxy, str], tmp_path: Path
) -> None:
    faults, url = proxy
    with near(tiny_pair, url, tmp_path) as gateway:
        before = len(faults.calls)

        def dies(path: str, real: bytes) -> Any:
            return (200, {}, real) if len(faults.calls) < before + 4 else (500, {}, b"{}")

        faults.spoil = dies
        with gateway.http.stream(
            "POST",
            "/v1/completions",
            json={"model": "tiny", "prompt": PROMPT, "max_tokens": 60, "temperature": 0, "stream": True,
                  "ignore_eos": True, "routing": EXACT},
        ) as answer:  # fmt: skip
            lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
        # An error, not an end: no finish_reason, no [DONE].
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "large_model_unavailable"
        assert not any('"finish_reason":"' in line for line in lines)
        text = "".join(json.loads(x.removeprefix("data: "))["choices"][0]["text"] for x in lines[:-1])
        steps = gateway.steps(answer.headers["x-request-id"])
        written = [r["token_bytes"] for r in steps if r["outcome"] not in ("rejected", "discarded")]
        assert b"".join(written).decode() == text
        assert len(text) >= 3


def test_leaving_while_a_call_is_under_way_frees_the_row_at_once(
    tiny_pair: TinyPair, proxy: tuple[FaultProxy, str], tmp_path: Path
) -> None:
    faults, url = proxy
    with near(tiny_pair, url, tmp_path) as gateway:
        faults.delay_s = 4.0
        with pytest.raises(httpx.ReadTimeout):
            gateway.http.post(
                "/v1/completions",
                json={"model": "tiny", "prompt": PROMPT, "temperature": 0, "routing": EXACT},
                timeout=0.5,
            )
        wait_for(lambda: gateway.worker.num_running == 0, 2.0)
        faults.delay_s = 0.0


def test_a_swapped_model_is_noticed_and_asked_no_more(
    tiny_pair: TinyPair, proxy: tuple[FaultProxy, str], tmp_path: Path
) -> None:
    faults, url = proxy
    with near(tiny_pair, url, tmp_path, check_s=0.1) as gateway:
        assert gateway.complete(routing=EXACT).status_code == 200

        def other(path: str, real: bytes) -> Any:
            told = json.loads(real)
            for choice in told.get("choices", ()):
                logprobs = choice["logprobs"]
                (top,), (own,) = logprobs["top_logprobs"], logprobs["token_logprobs"]
                logprobs["top_logprobs"] = [{name: value - 2.0 for name, value in top.items()}]
                logprobs["token_logprobs"] = [own - 2.0]
            return 200, {}, json.dumps(told).encode()

        faults.spoil = other
        wait_for(lambda: gateway.metric("large_available") == 0)
        assert gateway.complete(routing=EXACT).status_code == 503


def test_another_vocabulary_or_no_engine_at_all_stops_the_start_by_its_key(
    tiny_pair: TinyPair, proxy: tuple[FaultProxy, str], tmp_path: Path
) -> None:
    faults, url = proxy

    def other(path: str, real: bytes) -> Any:
        return 200, {}, json.dumps({"prompt": "something else"}).encode() if path == "/detokenize" else real

    faults.spoil = other
    with (
        pytest.raises(ConfigError, match=r"remote\.base_url: .*another vocabulary"),
        near(tiny_pair, url, tmp_path),
    ):
        pass
    faults.spoil = None
    faults.refuse = (404, {})
    with pytest.raises(ConfigError, match=r"remote\.base_url"), near(tiny_pair, url, tmp_path):
        pass
    with pytest.raises(ConfigError, match=r"no server"), near(tiny_pair, "http://127.0.0.1:9", tmp_path):
        pass

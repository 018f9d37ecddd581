"""Three tiers on `tiny` (three noise levels): the invariants in fp32, and the whole way through HTTP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fakes import Gathered, ask_for, decode, with_policy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import serving
from test_invariants import greedy_requests, neighbours, prompts, routes, sampled_requests

from gateway.api.service import Service
from gateway.config import Config, ConfigError, load_config
from gateway.core import FinishReason, Mode, Tier
from gateway.loading import load_worker
from gateway.metrics import Metrics
from gateway.models import CausalLM
from gateway.policy import Level, Policy
from gateway.prefix import PrefixCache
from gateway.recorded import COLUMNS
from gateway.replay import replay_all
from gateway.request import Request
from logs.recorder import Recorder

if TYPE_CHECKING:
    from tiny_pair import TinyPair


@pytest.fixture(scope="module")
def middle(tiny_pair: TinyPair) -> CausalLM:
    from tiny_pair import load

    return load(tiny_pair.folder / "middle")


@pytest.fixture(scope="module")
def large_only(tiny_pair: TinyPair) -> Gathered:
    """The answers of `large_only` to half of the hundred requests, with two tiers."""
    requests = [*greedy_requests()[::2], *sampled_requests()[::2]]
    return decode(tiny_pair.engine(), [with_policy(r, mode=Mode.LARGE_ONLY) for r in requests])


def levelled(request: Request, i: int) -> Request:
    """Middle thresholds from `pass everything on` to the policy's own, middle drafts of 1 to 12."""
    level = Level((0.0, 0.5, None, 0.9)[i % 4], 1 + i % 12)
    return with_policy(request, middle=level)


@pytest.mark.parametrize("requests", [greedy_requests, sampled_requests])
def test_exact_is_large_only_token_for_token_in_mixed_batches(
    tiny_pair: TinyPair, middle: CausalLM, large_only: Gathered, requests: Any
) -> None:
    known, others = requests()[::2], neighbours(20)
    writers: Counter[Tier] = Counter()
    for first in range(0, 25, 13):
        mine = [levelled(request, first + i) for i, request in enumerate(known[first : first + 13])]
        engine = tiny_pair.engine(
            middles=[middle], large_wait_s=0.002 * (first % 2), prefill_chunk=64 if first else 512
        )
        got = decode(engine, [*mine, *others[first % 7 :][:6]])
        for request in mine:
            assert large_only[request.id, 0].tokens == got[request.id, 0].tokens, request
            writers.update(step.tier for step in got[request.id, 0].output)
    assert writers[Tier.SMALL] > 30
    assert writers[Tier.MIDDLE] > 10


@given(st.data())
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_exact_holds_whatever_the_draft_lengths_and_the_batch(
    tiny_pair: TinyPair, middle: CausalLM, large_only: Gathered, data: st.DataObject
) -> None:
    chosen = data.draw(st.lists(st.integers(0, 49), min_size=1, max_size=6, unique=True))
    all_requests = [*greedy_requests()[::2], *sampled_requests()[::2]]
    mine = [
        with_policy(
            all_requests[i],
            draft_length=data.draw(st.integers(1, 16)),
            threshold=data.draw(st.sampled_from([0.0, 0.4])),
            middle=Level(data.draw(st.sampled_from([0.0, 0.6])), data.draw(st.integers(1, 16))),
        )
        for i in chosen
    ]
    engine = tiny_pair.engine(middles=[middle], prefixes=PrefixCache(data.draw(st.sampled_from([0, 4]))))
    got = decode(engine, [*mine, *neighbours(data.draw(st.integers(0, 6)))])
    for request in mine:
        assert large_only[request.id, 0].tokens == got[request.id, 0].tokens


def test_lossy_tokens_and_routes_do_not_depend_on_neighbours(tiny_pair: TinyPair, middle: CausalLM) -> None:
    requests = [levelled(request, i) for i, request in enumerate(neighbours(7))]
    together = decode(tiny_pair.engine(middles=[middle]), requests)
    for request in requests:
        alone = decode(tiny_pair.engine(middles=[middle]), [request])
        assert routes(alone[request.id, 0]) == routes(together[request.id, 0])


def test_protected_tokens_are_the_large_models_and_the_middle_relieves_it(
    tiny_pair: TinyPair, middle: CausalLM
) -> None:
    policy = Policy(protect_first=6, lookup=False, middle=Level(0.5, 16))
    requests = [
        ask_for(f"p{i}", prompt, policy=policy, max_tokens=40) for i, prompt in enumerate(prompts()[30:35])
    ]
    # With a middle tier nothing rides along.
    two = decode(tiny_pair.engine(guesses=False), requests)
    three = decode(tiny_pair.engine(middles=[middle]), requests)
    for request in requests:
        assert two[request.id, 0].tokens == three[request.id, 0].tokens
        assert {Tier.LARGE} == {row.tier for row in three[request.id, 0].output[:6]}

    def passes(got: Gathered) -> int:
        return sum(answer.finished.counts.large_passes for answer in got.values())

    assert passes(three) < passes(two)


def test_a_client_that_leaves_frees_everything_at_once(tiny_pair: TinyPair, middle: CausalLM) -> None:
    request = replace(greedy_requests()[40], policy=Policy(protect_first=0))
    whole = decode(tiny_pair.engine(middles=[middle]), [request])[request.id, 0]
    for ticks in range(1, 12):
        engine, got = tiny_pair.engine(middles=[middle]), Gathered()
        engine.add(request)
        for _ in range(ticks):
            got.take(engine.tick())
        got.take(engine.cancel(request.id))
        left = got[request.id, 0]
        assert engine.pool.num_free == engine.pool.num_blocks
        assert left.tokens == whole.tokens[: len(left.tokens)]
        assert left.finished.reason in (FinishReason.ABORT, whole.finished.reason)


# ---- through the config and HTTP

CONFIG = """
[models]
preset = "tiny"
middle = ["middle"]
[engine]
max_model_len = 256
max_rows = 4
kv_memory_gib = 0.05
[policy.stable]
accept = "token_v3"
threshold = 0.3
[policy.stable.middle]
threshold = 0.5
draft_length = 8
[policy.trusting]
accept = "trust"
threshold = 0.6
lookup = false
"""
HELLO = {"model": "tiny", "prompt": "Hello, tape", "max_tokens": 48, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Recorder]]:
    folder = tmp_path_factory.mktemp("three")
    (folder / "three.toml").write_text(CONFIG)
    config = load_config(folder / "three.toml", {})
    metrics, recorder = Metrics(), Recorder(folder)
    worker = load_worker(config, [recorder, metrics])
    service = Service(config=config, metrics=metrics, model_name="tiny", recorder=recorder, engine=worker)
    with (
        serving(service) as url,
        httpx.Client(base_url=url, timeout=60, trust_env=False, verify=False) as client,
    ):
        yield client, recorder
    worker.stop()
    recorder.close()


def answer(http: httpx.Client, **body: Any) -> dict[str, Any]:
    got = http.post("/v1/completions", json=HELLO | body)
    assert got.status_code == 200, got.text
    found: dict[str, Any] = got.json()
    return found


def test_the_response_counts_every_tier_and_the_tape_names_them(
    gateway: tuple[httpx.Client, Recorder],
) -> None:
    http, _ = gateway
    got = answer(http)
    routing = got["routing"]
    assert routing["middle_tokens"] > 0
    written = ("small_tokens", "middle_tokens", "large_tokens", "lookup_tokens")
    assert sum(routing[name] for name in written) == got["usage"]["completion_tokens"] == 48
    summary = http.get(f"/v1/traces/{got['id']}").json()
    assert summary["middle_models"] == ["tiny/middle"]
    assert len(summary["middle_hashes"][0]) > 8
    assert summary["middle_tokens"] == summary["totals"]["middle_tokens"] == routing["middle_tokens"]
    assert summary["policy"]["middle"] == {"threshold": 0.5, "draft_length": 8}
    columns = http.get(f"/v1/traces/{got['id']}/steps").json()["columns"]
    by_middle = [
        views for views, tier in zip(columns["middle"], columns["tier"], strict=True) if tier == "middle"
    ]
    assert all(views[-1]["action"] for views in by_middle)
    assert {"small", "middle", "large"} <= set(columns["tier"])
    found = 'tokentape:generation_tokens_total{tier="middle"}'
    counted = next(line for line in http.get("/metrics").text.splitlines() if line.startswith(found))
    assert float(counted.split()[-1]) >= routing["middle_tokens"]


def test_every_mode_replays_from_the_tape_with_no_mismatch(gateway: tuple[httpx.Client, Recorder]) -> None:
    http, recorder = gateway
    for i, prompt in enumerate(prompts()[20:28]):
        routing: dict[str, Any] = [{}, {"policy": "trusting"}, {"accept": "exact"}, {"mode": "shadow"}][i % 4]
        answer(http, prompt=list(prompt), seed=i, temperature=i % 2, routing=routing, logprobs=2)
    recorder.flush()
    results = list(replay_all(recorder.reader().every_choice(COLUMNS)))
    assert [str(m) for result in results for m in result.mismatches] == []
    assert sum(result.decisions for result in results) > 300


def test_a_fork_runs_all_tiers_again_and_what_if_says_what_it_cannot(
    gateway: tuple[httpx.Client, Recorder],
) -> None:
    http, _ = gateway
    parent = answer(http, prompt="To be forked")
    fork = http.post(f"/v1/traces/{parent['id']}/fork", json={"at": 20}).json()
    assert fork["first_divergence"] is None
    told = http.post(f"/v1/traces/{parent['id']}/what-if", json={"routing": {"threshold": 0.9}})
    assert (told.status_code, told.json()["error"]["code"]) == (400, "middle_tiers")


def test_a_level_that_is_not_served_is_refused_by_name(gateway: tuple[httpx.Client, Recorder]) -> None:
    http, _ = gateway
    assert answer(http, routing={"middle": {"threshold": 0.9}})["routing"]["policy_hash"]
    got = http.post("/v1/completions", json=HELLO | {"routing": {"middle2": {"threshold": 0.9}}})
    assert (got.status_code, got.json()["error"]["param"]) == (400, "routing.middle2")
    got = http.post("/v1/completions", json=HELLO | {"routing": {"middle": {"draft_length": 99}}})
    assert (got.status_code, got.json()["error"]["param"]) == (400, "routing.middle.draft_length")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('[policy.stable.middle]\nthreshold = 0.5', "policy.stable.middle"),
        ('[models]\npreset = "tiny"\nmiddle = ["a", "b", "c", "d"]', "models.middle"),
        ('[models]\nmiddle = ["middle"]\n[policy.x.middle]\nalpha = 0.5', "policy.x.middle.alpha"),
        ('[models]\nmiddle = ["middle"]\n[policy.x.middle3]', "policy.x.middle3"),
    ],
)  # fmt: skip
def test_a_config_that_names_a_tier_that_is_not_there_is_refused(tmp_path: Path, text: str, key: str) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ConfigError, match=f"^{key}"):
        load_config(tmp_path / "c.toml", {})


def test_a_middle_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('[models]\npreset = "tiny"\nmiddle = ["nothing"]')
    config: Config = load_config(tmp_path / "c.toml", {})
    with pytest.raises(ValueError, match=r"models\.middle: 'nothing'"):
        load_worker(config, [])

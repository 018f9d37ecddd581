"""The debugger, opinions and rollouts over real HTTP, on the real engine with `tiny`."""

from __future__ import annotations

import hashlib
import io
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pyarrow.parquet as pq
import pytest
from serving import TINY, serving

from alerts.config import AlertsConfig
from alerts.service import AlertsService
from gateway.api.service import Service
from gateway.metrics import Metrics
from gateway.request import Served
from gateway.worker import Worker
from logs.recorder import Recorder

if TYPE_CHECKING:
    from tiny_pair import TinyPair

HELLO = {"model": "tiny", "prompt": "Hello, tape", "max_tokens": 40, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def http(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("tape")
    metrics, recorder = Metrics(), Recorder(folder)
    alerts = AlertsService(
        config=AlertsConfig(),
        data_dir=folder,
        cursor=recorder.cursor,
        policies=TINY.policies,
        environ={},
        base_url="http://gateway",
        samples=dict,
        queue_limit=64,
    )
    metrics.watch_alerts(alerts.samples)
    served = Served("tiny/small", "tiny/large", "a" * 16, "b" * 16, "cpu/float32/none", "test")
    worker = Worker(tiny_pair.engine(), served, [recorder, metrics, alerts.observer])
    worker.start()
    alerts.start()
    service = Service(
        config=TINY, metrics=metrics, model_name="tiny", recorder=recorder, engine=worker, alerts=alerts
    )
    with (
        serving(service) as url,
        httpx.Client(base_url=url, timeout=60, trust_env=False, verify=False) as client,
    ):
        yield client
    worker.stop()
    alerts.stop()
    recorder.close()


def answer(http: httpx.Client, **body: Any) -> dict[str, Any]:
    """A completion on `tiny`."""
    got = http.post("/v1/completions", json=HELLO | body)
    assert got.status_code == 200, got.text
    found: dict[str, Any] = got.json()
    return found


def output(http: httpx.Client, trace_id: str) -> list[tuple[int, str, str]]:
    """Written rows of a trace: (token id, tier, outcome)."""
    columns = http.get(f"/v1/traces/{trace_id}/steps").json()["columns"]
    rows = zip(columns["token_id"], columns["tier"], columns["outcome"], strict=True)
    return [row for row in rows if row[2] not in ("rejected", "discarded")]


def test_what_if_with_nothing_changed_flips_nothing(http: httpx.Client) -> None:
    trace = answer(http)["id"]
    found = http.post(f"/v1/traces/{trace}/what-if", json={"routing": {}}).json()
    assert (found["first_flip"], found["flips"]) == (None, [])
    assert len(found["decisions"]) == 40


def test_a_threshold_that_nothing_reaches_flips_every_kept_token(http: httpx.Client) -> None:
    trace = answer(http)["id"]
    columns = http.get(f"/v1/traces/{trace}/steps").json()["columns"]
    kept = {
        idx
        for idx, action, reason in zip(columns["idx"], columns["action"], columns["reason"], strict=True)
        if (action, reason) == ("keep", "confident")
    }
    body = {"routing": {"threshold": 1.0, "lookup": False}}
    found = http.post(f"/v1/traces/{trace}/what-if", json=body).json()
    assert kept <= set(found["flips"])
    assert found["estimate"]["kept_share"] < found["estimate"]["recorded_kept_share"]


def test_a_fork_with_nothing_changed_is_the_same_text(http: httpx.Client) -> None:
    trace = answer(http)["id"]
    forked = http.post(f"/v1/traces/{trace}/fork", json={"at": 15}).json()
    parent, child = output(http, trace), output(http, forked["id"])
    assert [row[0] for row in child] == [row[0] for row in parent]
    assert [row[2] for row in child[:15]] == ["forced"] * 15
    assert forked["first_divergence"] is None
    assert forked["max_logprob_difference"] < 1e-4
    summary = http.get(f"/v1/traces/{forked['id']}").json()
    assert (summary["parent"], summary["forked_at"]) == (trace, 15)


def test_a_sampled_choice_forks_with_its_own_noise(http: httpx.Client) -> None:
    trace = answer(http, temperature=1.0, seed=5, n=2)["id"]
    columns = http.get(f"/v1/traces/{trace}/steps", params={"choice": 1}).json()["columns"]
    rows = zip(columns["token_id"], columns["outcome"], strict=True)
    parent = [token for token, outcome in rows if outcome not in ("rejected", "discarded")]
    forked = http.post(f"/v1/traces/{trace}/fork", params={"choice": 1}, json={"at": 12}).json()
    assert [row[0] for row in output(http, forked["id"])] == parent


def test_a_forced_token_is_written_and_the_rest_follows_from_it(http: httpx.Client) -> None:
    trace = answer(http)["id"]
    parent = output(http, trace)
    other = next(t for t in range(65, 90) if t != parent[20][0])
    forked = http.post(f"/v1/traces/{trace}/fork", json={"at": 20, "token_id": other}).json()
    child = output(http, forked["id"])
    assert [row[0] for row in child[:21]] == [*(row[0] for row in parent[:20]), other]
    assert forked["first_divergence"] == 20
    # What the large model alone writes after the same tokens is what an exact fork must write.
    prompt = http.post("/tokenize", json={"model": "tiny", "prompt": HELLO["prompt"]}).json()["tokens"]
    prefix = [*prompt, *(row[0] for row in child[:21])]
    alone = answer(http, prompt=prefix, max_tokens=19, routing={"mode": "large_only"})["id"]
    assert [row[0] for row in output(http, alone)] == [row[0] for row in child[21:]]


def test_a_fork_with_other_routing(http: httpx.Client) -> None:
    trace = answer(http)["id"]
    body = {"at": 10, "routing": {"mode": "large_only"}}
    forked = http.post(f"/v1/traces/{trace}/fork", json=body).json()["id"]
    child = output(http, forked)
    assert {row[1] for row in child[10:]} == {"large"}
    report = http.get(f"/v1/traces/{forked}/replay").json()
    assert report["mismatches"] == 0


def test_a_chat_forks(http: httpx.Client) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 20,
        "temperature": 0,
    }
    trace = http.post("/v1/chat/completions", json=body).json()["id"]
    parent = output(http, trace)
    forked = http.post(f"/v1/traces/{trace}/fork", json={"at": 3}).json()
    assert [row[0] for row in output(http, forked["id"])] == [row[0] for row in parent]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"at": 41}, "at"),
        ({"at": 40}, "at"),
        ({"at": -1}, "at"),
        ({"at": 3, "token_id": 99_999}, "token_id"),
        ({"at": 3, "routing": {"threshold": 2}}, "routing.threshold"),
        ({"at": 3, "nonsense": 1}, "nonsense"),
    ],
)
def test_a_bad_fork_names_the_field(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    trace = answer(http)["id"]
    got = http.post(f"/v1/traces/{trace}/fork", json=body)
    assert (got.status_code, got.json()["error"]["param"]) == (400, param)


def test_unknown_traces_and_choices_are_404(http: httpx.Client) -> None:
    trace = answer(http)["id"]
    for path, body in (
        ("/v1/traces/nope/what-if", {"routing": {}}),
        ("/v1/traces/nope/fork", {"at": 1}),
        ("/v1/traces/nope/scores", {"name": "a", "value": 1}),
        (f"/v1/traces/{trace}/what-if?choice=3", {"routing": {}}),
    ):
        assert http.post(path, json=body).status_code == 404
    assert http.get(f"/v1/traces/{trace}/diff/nope").status_code == 404


def test_a_diff_finds_where_two_answers_part(http: httpx.Client) -> None:
    a = answer(http)["id"]
    b = http.post(f"/v1/traces/{a}/fork", json={"at": 12, "token_id": 65}).json()["id"]
    found = http.get(f"/v1/traces/{a}/diff/{b}").json()
    first, second = output(http, a), output(http, b)
    plain = next(i for i, (x, y) in enumerate(zip(first, second, strict=False)) if x[0] != y[0])
    assert (found["first_divergence"], found["num_same"]) == (plain, plain)


def test_exports_hold_every_row(http: httpx.Client) -> None:
    trace = answer(http)["id"]
    columns = http.get(f"/v1/traces/{trace}/steps").json()["columns"]
    lines = http.get(f"/v1/traces/{trace}/export").text.splitlines()
    steps = [json.loads(line)["step"] for line in lines if "step" in json.loads(line)]
    assert [step["token_id"] for step in steps] == columns["token_id"]
    file = http.get(f"/v1/traces/{trace}/export", params={"format": "parquet"}).content
    assert pq.read_table(io.BytesIO(file))["token_id"].to_pylist() == columns["token_id"]


def test_advice_and_diagnosis_come_from_what_was_served(http: httpx.Client) -> None:
    answer(http)
    advice = http.get("/v1/advisor").json()
    assert advice["labels"] > 0
    kept = [point["kept_share"] for point in advice["curve"]]
    assert kept == sorted(kept, reverse=True)
    findings = http.get("/v1/diagnose").json()["data"]
    assert findings
    assert {"cause", "share", "evidence", "change", "noticed"} <= findings[0].keys()
    assert http.get("/v1/advisor", params={"policy": "nope"}).json()["error"]["param"] == "policy"


def test_opinions_are_kept_and_reviewed_answers_are_not_drawn_again(http: httpx.Client) -> None:
    trace = answer(http)["id"]
    assert http.post(f"/v1/traces/{trace}/scores", json={"name": "right", "value": 0.5}).status_code == 201
    drawn = {t["request_id"] for t in http.get("/v1/reviews/sample", params={"n": 500}).json()["data"]}
    assert trace in drawn
    review = {"verdict": "good", "note": "<b>fine</b>", "reviewer": "me"}
    assert http.post(f"/v1/traces/{trace}/reviews", json=review).status_code == 201
    drawn = {t["request_id"] for t in http.get("/v1/reviews/sample", params={"n": 500}).json()["data"]}
    assert trace not in drawn
    summary = http.get(f"/v1/traces/{trace}").json()
    assert [(r["verdict"], r["note"]) for r in summary["reviews"]] == [("good", "<b>fine</b>")]
    assert [(s["name"], s["value"]) for s in summary["scores"]] == [("right", 0.5)]


def test_a_rollout_splits_users_as_the_contract_says_and_ends_when_asked(http: httpx.Client) -> None:
    body = {"name": "looser", "canary": {"threshold": 0.3}, "weight": 0.5, "steps": [0.5]}
    started = http.post("/v1/rollouts", json=body)
    assert started.status_code == 201, started.text
    assert http.post("/v1/rollouts", json=body | {"name": "second"}).status_code == 409
    rollout = http.get("/v1/rollouts/looser").json()
    salt = rollout["salt"]
    for user in ("ada", "bob", "cy", "dee"):
        bucket = int.from_bytes(hashlib.sha256(f"{salt}:{user}".encode()).digest(), "big") % 10000
        arm = answer(http, user=user, max_tokens=2)["routing"]["arm"]
        assert arm == ("canary" if bucket < 5000 else "stable")
    deadline = time.monotonic() + 10
    while "tokentape:canary_weight 0.5" not in http.get("/metrics").text:
        assert time.monotonic() < deadline
    assert http.post("/v1/rollouts/looser/abort").json()["verdict"] == "aborted"
    assert answer(http, user="ada", max_tokens=2)["routing"]["arm"] == "stable"
    assert http.post("/v1/rollouts/looser/abort").status_code == 409
    assert http.get("/v1/rollouts/nope").status_code == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"name": "x", "canary": {"treshold": 0.3}}, "canary.treshold"),
        ({"name": "x", "canary": {}, "weights": 1}, "weights"),
        ({"name": "x", "canary": {"threshold": 0.3}, "weight": 2.0}, "weight"),
        ({"name": "x", "canary": {"middle": {"threshold": 0.3}}}, "canary.middle"),
    ],
)
def test_a_bad_rollout_names_the_field(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    got = http.post("/v1/rollouts", json=body)
    assert (got.status_code, got.json()["error"]["param"]) == (400, param)


def test_silences_come_and_go(http: httpx.Client) -> None:
    body = {"matchers": {"alertname": "QualityDrift"}, "author": "me", "duration_s": 60}
    silence = http.post("/v1/alerts/silences", json=body).json()
    assert [s["id"] for s in http.get("/v1/alerts").json()["silences"]] == [silence["id"]]
    assert http.delete(f"/v1/alerts/silences/{silence['id']}").status_code == 200
    assert http.get("/v1/alerts").json()["silences"] == []
    assert http.get("/v1/webhooks/deliveries").json() == {"data": []}

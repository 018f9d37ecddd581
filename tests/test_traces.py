"""The traces that /v1/traces shows are what was recorded."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pyarrow as pa
import pytest
from fake_worker import ANSWER
from serving import FakeGateway, fake_gateway

from logs.schema import names


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGateway]:
    with fake_gateway(data_dir=tmp_path_factory.mktemp("tape")) as gateway:
        yield gateway


def complete(gateway: FakeGateway, **body: object) -> str:
    """The id of a finished completion."""
    answer = gateway.post("/v1/completions", {"model": "tiny", "prompt": "hi", **body})
    return str(answer.json()["id"])


def test_a_trace_is_readable_once_its_response_has_ended(gateway: FakeGateway) -> None:
    trace_id = complete(gateway, max_tokens=8, seed=3, user="u")
    trace = gateway.http.get(f"/v1/traces/{trace_id}").json()
    assert (trace_id, "length", 8, 3) == (
        trace["request_id"],
        trace["finish_reason"],
        trace["completion_tokens"],
        trace["seed"],
    )
    assert trace["params"] == {"model": "tiny", "prompt": "hi", "max_tokens": 8, "seed": 3, "user": "u"}


def test_a_streamed_trace_too(gateway: FakeGateway) -> None:
    response = gateway.post("/v1/completions", {"model": "tiny", "prompt": "hi", "stream": True})
    trace = gateway.http.get(f"/v1/traces/{response.headers['x-request-id']}").json()
    assert trace["finish_reason"] == "length"


def test_steps_spell_the_answer(gateway: FakeGateway) -> None:
    trace_id = complete(gateway, max_tokens=12)
    columns = gateway.http.get(f"/v1/traces/{trace_id}/steps").json()["columns"]
    assert set(names("steps")) - {"trace_no"} == set(columns)
    spelled = b"".join(base64.b64decode(value) for value in columns["token_bytes"])
    assert ANSWER.encode()[:12] == spelled
    assert list(range(12)) == columns["idx"]


def test_steps_of_a_range(gateway: FakeGateway) -> None:
    trace_id = complete(gateway, max_tokens=12)
    columns = gateway.http.get(f"/v1/traces/{trace_id}/steps?from=3&to=5").json()["columns"]
    assert columns["idx"] == [3, 4]


def test_steps_as_arrow(gateway: FakeGateway) -> None:
    trace_id = complete(gateway, max_tokens=12)
    url, mime = f"/v1/traces/{trace_id}/steps", "application/vnd.apache.arrow.stream"
    response = gateway.http.get(url, headers={"accept": mime})
    assert mime == response.headers["content-type"]
    table = pa.ipc.open_stream(response.content).read_all()
    assert gateway.http.get(url).json()["columns"]["token_id"] == table["token_id"].to_pylist()


def test_a_choice_that_is_not_there_is_404(gateway: FakeGateway) -> None:
    trace_id = complete(gateway, n=2)
    assert gateway.http.get(f"/v1/traces/{trace_id}/steps?choice=1").status_code == 200
    assert gateway.http.get(f"/v1/traces/{trace_id}/steps?choice=2").status_code == 404


def test_pages_are_newest_first_and_do_not_overlap(gateway: FakeGateway) -> None:
    made = [complete(gateway, max_tokens=1) for _ in range(5)]
    first = gateway.http.get("/v1/traces?limit=2").json()
    second = gateway.http.get(f"/v1/traces?limit=3&cursor={first['next_cursor']}").json()
    assert made[::-1] == [trace["request_id"] for trace in first["data"] + second["data"]]


def test_filters(gateway: FakeGateway) -> None:
    trace_id = complete(gateway, prompt="a needle in the hay", max_tokens=1)

    def found(query: str) -> list[str]:
        return [t["request_id"] for t in gateway.http.get(f"/v1/traces?{query}").json()["data"]]

    # The fake gateway has no decoder, so text is looked for in the id.
    assert [trace_id] == found(f"q={trace_id}")
    assert trace_id in found("arm=stable&finish_reason=length")
    assert found("finish_reason=error") == []
    assert found("until=5") == []


@pytest.mark.parametrize("path", ["traces", "tape/export", "advisor", "diagnose"])
@pytest.mark.parametrize("query", ["since=nan", "until=inf", "since=-1"])
def test_no_moment_no_answer(gateway: FakeGateway, path: str, query: str) -> None:
    refused = gateway.http.get(f"/v1/{path}?{query}")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, query.split("=")[0])


def test_the_metrics_count_what_was_served(gateway: FakeGateway) -> None:
    def value(name: str) -> float:
        lines = gateway.http.get("/metrics").text.splitlines()
        return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + " "))

    before = value('tokentape:generation_tokens_total{tier="large"}')
    complete(gateway, max_tokens=12)
    assert before + 4 == value('tokentape:generation_tokens_total{tier="large"}')

"""What goes wrong at the gateway becomes one sentence and a next action."""

from __future__ import annotations

import httpx
import pytest
from fake_gateway import FakeGateway, demo

from replay_ui import client
from replay_ui.client import Gateway, Problem, gateway_url, listed


@pytest.fixture(scope="module")
def traces() -> FakeGateway:
    return demo()


@pytest.fixture
def asked(traces: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> tuple[FakeGateway, Gateway]:
    fake = FakeGateway()
    fake.traces = dict(traces.traces)
    monkeypatch.setattr(client, "transport", fake.transport)
    return fake, Gateway("http://gateway")


def answering(monkeypatch: pytest.MonkeyPatch, status: int, body: bytes) -> Gateway:
    monkeypatch.setattr(
        client, "transport", lambda: httpx.MockTransport(lambda _: httpx.Response(status, content=body))
    )
    return Gateway("http://gateway")


def test_a_page_of_traces_has_ids_and_a_cursor(asked: tuple[FakeGateway, Gateway]) -> None:
    _, gateway = asked
    rows, cursor = gateway.traces(limit=2, q="")
    assert len(rows) == 2
    assert all(row["id"] for row in rows)
    again, _ = gateway.traces(limit=2, cursor=cursor)
    assert {row["id"] for row in rows}.isdisjoint(row["id"] for row in again)


def test_ids_are_quoted(asked: tuple[FakeGateway, Gateway]) -> None:
    fake, gateway = asked
    with pytest.raises(Problem) as caught:
        gateway.trace("../models?x=1")
    assert caught.value.kind == "absent"
    assert fake.calls[-1][1] == "/v1/traces/..%2Fmodels%3Fx%3D1"


def test_token_texts_are_asked_once(asked: tuple[FakeGateway, Gateway]) -> None:
    fake, gateway = asked
    first = dict(gateway.texts([0, 1, 0]))
    calls = len(fake.calls)
    assert dict(gateway.texts([1, 0])) == first
    assert len(fake.calls) == calls


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (401, b'{"error": {"message": "no key", "code": "invalid_api_key"}}', "denied"),
        (403, b'{"error": {"message": "scope", "code": "forbidden"}}', "denied"),
        (404, b'{"error": {"message": "x", "code": "trace_not_found"}}', "absent"),
        (404, b'{"error": {"message": "x", "code": "not_found"}}', "unsupported"),
        (405, b"", "unsupported"),
        (400, b'{"error": {"message": "threshold: too big", "code": "invalid_value"}}', "refused"),
        (500, b"<html>oops", "failed"),
        (503, b'{"error": null}', "failed"),
    ],
)
def test_every_refusal_has_a_kind(
    monkeypatch: pytest.MonkeyPatch, status: int, body: bytes, kind: str
) -> None:
    with pytest.raises(Problem) as caught:
        answering(monkeypatch, status, body).json("GET", "/v1/traces/a")
    assert caught.value.kind == kind
    assert caught.value.says.endswith((".", "oops", "big", "null}"))
    assert caught.value.then.endswith(".")


@pytest.mark.parametrize(("error", "kind"), [(httpx.ConnectError, "down"), (httpx.ReadTimeout, "failed")])
def test_a_lost_gateway_is_told(monkeypatch: pytest.MonkeyPatch, error: type[Exception], kind: str) -> None:
    def fail(_: httpx.Request) -> httpx.Response:
        raise error("no")

    monkeypatch.setattr(client, "transport", lambda: httpx.MockTransport(fail))
    with pytest.raises(Problem) as caught:
        Gateway("http://gateway").traces()
    assert caught.value.kind == kind
    assert "http://gateway" in caught.value.says


def test_the_key_travels_in_a_header_alone(asked: tuple[FakeGateway, Gateway]) -> None:
    fake, gateway = asked
    fake.key = "sk-1"
    with pytest.raises(Problem):
        gateway.traces()
    gateway.key = "sk-1"
    assert gateway.traces()
    assert "sk-1" not in str(fake.calls)


def test_where_the_gateway_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["app.py"])
    monkeypatch.delenv("TOKENTAPE_URL", raising=False)
    assert gateway_url() == "http://127.0.0.1:8000"
    monkeypatch.setenv("TOKENTAPE_URL", "http://h:1/")
    assert gateway_url() == "http://h:1"
    monkeypatch.setattr("sys.argv", ["app.py", "--gateway", "http://h:2"])
    assert gateway_url() == "http://h:2"


def test_lists_come_bare_or_wrapped() -> None:
    assert listed([{"a": 1}], "x") == listed({"data": [{"a": 1}]}, "x") == listed({"x": [{"a": 1}]}, "x")
    assert listed({"data": []}, "x") == []

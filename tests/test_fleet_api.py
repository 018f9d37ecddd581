"""The fleet over HTTP: who rules, who follows, and what a client is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
from serving import FakeGateway, fake_gateway

from alerts.config import AlertsConfig
from alerts.follow import Control
from alerts.orders import Orders
from alerts.service import AlertsService
from gateway.access import Key, Keyring, Scope, digest_of
from gateway.config import Config, ConfigError, FleetConfig, ModelsConfig, load_config
from gateway.policy import Policy

ROLLOUT = {"name": "looser", "canary": {"threshold": 0.1}, "weight": 0.5, "steps": [0.5]}
READ, INFER = "read-key", "infer-key"
KEYS = Keyring(
    [
        Key("admin", digest_of("admin-key"), frozenset(Scope)),
        Key("fleet", digest_of(READ), frozenset({Scope.READ})),
        Key("client", digest_of(INFER), frozenset({Scope.INFER})),
    ]
)
ADMIN_HEADERS = {"authorization": "Bearer admin-key"}


@contextmanager
def member(folder: Path, name: str, control: Control | None = None) -> Iterator[FakeGateway]:
    """A gateway of a fleet without models, its service judging nothing by itself."""
    config = Config(
        models=ModelsConfig(preset="tiny"),
        fleet=FleetConfig(name=name, share=str(folder / "share"), close_s=10.0),
    )
    with fake_gateway(config, folder / name, keys=KEYS) as gateway:
        recorder = gateway.service.recorder
        assert recorder is not None
        alerts = AlertsService(
            config=msgspec.convert({"interval_s": 1000.0}, AlertsConfig),
            data_dir=folder / name,
            cursor=recorder.cursor,
            policies=config.policies,
            environ={},
            base_url=gateway.url,
            samples=dict,
            queue_limit=100,
            name=name,
            control=control,
        )
        gateway.service.alerts = alerts
        gateway.http.headers.update(ADMIN_HEADERS)
        yield gateway
        if alerts.follower is not None:
            alerts.follower.stop()


@pytest.fixture
def control(tmp_path: Path) -> Iterator[FakeGateway]:
    with member(tmp_path, "east") as gateway:
        yield gateway


def test_orders_have_an_etag_and_are_held_until_they_change(control: FakeGateway) -> None:
    first = control.http.get("/v1/fleet")
    assert Orders.read(first.content) == Orders("east", Policy())
    again = control.http.get("/v1/fleet", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    answers = []

    def wait() -> None:
        known = {"if-none-match": first.headers["etag"], **ADMIN_HEADERS}
        url = f"{control.url}/v1/fleet?wait_s=30"
        answers.append(httpx.get(url, headers=known, timeout=60, trust_env=False))

    waiting = threading.Thread(target=wait)
    began = time.monotonic()
    waiting.start()
    control.post("/v1/rollouts", ROLLOUT)
    waiting.join()
    assert time.monotonic() - began < 25
    (answer,) = answers
    split = Orders.read(answer.content).split
    assert split is not None
    assert (answer.status_code, split.name, split.weight) == (200, "looser", 0.5)
    assert split.salt == control.http.get("/v1/rollouts/looser").json()["salt"]


@pytest.mark.parametrize(
    ("key", "status"), [(None, 401), ("wrong", 401), (INFER, 403), (READ, 200), ("admin-key", 200)]
)
def test_orders_need_a_key_that_may_read(control: FakeGateway, key: str | None, status: int) -> None:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    assert httpx.get(f"{control.url}/v1/fleet", headers=headers, trust_env=False).status_code == status


@pytest.mark.parametrize("query", ["wait_s=61", "wait_s=-1", "wait_s=nan", "other=1"])
def test_a_query_that_makes_no_sense_is_refused(control: FakeGateway, query: str) -> None:
    assert control.http.get(f"/v1/fleet?{query}").status_code == 400


def test_a_follower_follows_passes_reads_on_and_refuses_writes(tmp_path: Path, control: FakeGateway) -> None:
    control.post("/v1/rollouts", ROLLOUT)
    with member(tmp_path, "west", Control(control.url, READ)) as west:
        follower = west.service.alerts.follower  # type: ignore[union-attr]
        assert follower is not None
        follower.poll()
        arms = {
            name: [
                gateway.post(
                    "/v1/completions",
                    {"model": "tiny", "prompt": "x", "user": f"u{i}"},
                ).json()["routing"]["arm"]
                for i in range(20)
            ]
            for name, gateway in (("east", control), ("west", west))
        }
        assert arms["east"] == arms["west"]
        assert set(arms["east"]) == {"stable", "canary"}
        there = control.http.get("/v1/rollouts/looser").json()
        assert west.http.get("/v1/rollouts/looser").json()["salt"] == there["salt"]
        assert [r["name"] for r in west.http.get("/v1/rollouts").json()["data"]] == ["looser"]
        for path, body in (("/v1/rollouts", ROLLOUT), ("/v1/rollouts/looser/abort", {})):
            refused = west.post(path, body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_control")
            assert control.url in refused.json()["error"]["message"]
        refused = west.http.get("/v1/fleet")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_control")


def test_a_control_that_is_away_is_a_503_that_names_it(tmp_path: Path) -> None:
    with member(tmp_path, "west", Control("http://127.0.0.1:9")) as west:
        answer = west.http.get("/v1/rollouts")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "control_away")
        assert "http://127.0.0.1:9" in answer.json()["error"]["message"]


def test_answers_and_refusals_name_the_gateway(control: FakeGateway) -> None:
    answer = control.post("/v1/completions", {"model": "tiny", "prompt": "x"})
    assert answer.headers["x-tokentape-gateway"] == "east"
    missing = control.http.get("/v1/traces/absent")
    assert (missing.status_code, missing.headers["x-tokentape-gateway"]) == (404, "east")
    message = missing.json()["error"]["message"]
    assert "this gateway (east)" in message
    assert "about 20 s" in message
    assert control.http.get("/v1/traces/absent/replay").json()["error"]["message"] == message


def test_traces_by_gateway(control: FakeGateway) -> None:
    made = control.post("/v1/completions", {"model": "tiny", "prompt": "x"}).json()["id"]
    found = control.http.get("/v1/traces?gateway=east").json()["data"]
    assert [(row["id"], row["gateway"]) for row in found] == [(made, "east")]
    assert control.http.get("/v1/traces?gateway=west").json()["data"] == []


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"FLEET_SHARE": "/x"}, "fleet.name"),
        ({"FLEET_CONTROL": "http://a:1"}, "fleet.name"),
        ({"FLEET_NAME": "../a"}, "fleet.name"),
        ({"FLEET_NAME": "a", "FLEET_CONTROL": "ftp://a"}, "fleet.control"),
        ({"FLEET_NAME": "a", "FLEET_CONTROL": "http://u:p@a:1"}, "fleet.control"),
        ({"FLEET_NAME": "a", "FLEET_CONTROL": "http://a:1/v1"}, "fleet.control"),
        ({"FLEET_CLOSE_S": "0"}, "fleet.close_s"),
        ({"FLEET_SILENT_S": "1"}, "fleet.silent_s"),
        ({"OTEL_ENDPOINT": "localhost:4318"}, "otel.endpoint"),
        ({"OTEL_SAMPLE": "1.5"}, "otel.sample"),
    ],
)
def test_settings_that_cannot_be_used_are_named(settings: dict[str, str], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}"):
        load_config(None, {f"TOKENTAPE_{name}": value for name, value in settings.items()})

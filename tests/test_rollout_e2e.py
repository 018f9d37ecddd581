"""A bad canary over real HTTP, from its start to the page it sends, with the gateway killed on the way."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from standardwebhooks import Webhook

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

SECRET = "whsec_dG9rZW50YXBlIGVuZCB0byBlbmQgdGVzdCBzZWNyZXQ="
FAILURES = 2
"""Attempts of each message that the receiver answers with 503 before it takes it."""
AT_A_TIME = 16
MOST_REQUESTS = 600
CANARY = {"accept": "trust", "threshold": 0.0}


class Receiver:
    """A webhook receiver on loopback that fails twice for every message, then answers."""

    def __init__(self) -> None:
        self.attempts: list[tuple[str, dict[str, str], bytes, int]] = []
        self.lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                status = receiver.take(headers, content)
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/hook"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def take(self, headers: dict[str, str], content: bytes) -> int:
        """The status that this attempt gets."""
        with self.lock:
            before = sum(1 for id, *_ in self.attempts if id == headers["webhook-id"])
            status = 503 if before < FAILURES else 204
            self.attempts.append((headers["webhook-id"], headers, content, status))
            return status

    def seen(self) -> list[dict[str, Any]]:
        """Every message attempted, answered or not, once for each id."""
        with self.lock:
            return list({id: json.loads(content) for id, _, content, _ in self.attempts}.values())

    def taken(self) -> list[dict[str, Any]]:
        """Bodies of the accepted messages, verified, repeats of an id dropped, in order of acceptance."""
        with self.lock:
            accepted = [attempt for attempt in self.attempts if attempt[3] == 204]
        first = {id: (headers, content) for id, headers, content, _ in reversed(accepted)}
        for headers, content in first.values():
            Webhook(SECRET).verify(content, headers)
        return [json.loads(content) for _, content in reversed(first.values())]

    def close(self) -> None:
        """Stop listening."""
        self.server.shutdown()
        self.server.server_close()


class Gateway:
    """`tokentape serve --preset tiny --no-ui` in a process of its own, at one address for all its lives."""

    def __init__(self, folder: Path, receiver: Receiver) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.folder = folder
        self.config = folder / "tokentape.toml"
        self.config.write_text(
            f"""
[alerts]
interval_s = 0.2

[[alerts.receivers]]
name = "pager"
kind = "webhook"
url = "{receiver.url}"
secret_env = "PAGER_SECRET"
allow_private = true
events = true
"""
        )
        self.users = itertools.count()
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}",
            timeout=30,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    def start(self) -> None:
        """Run until it can answer."""
        command = [sys.executable, "-m", "gateway.cli", "serve", "--preset", "tiny", "--no-ui"]
        command += ["--config", str(self.config), "--port", str(self.port)]
        command += ["--data-dir", str(self.folder / "tape")]
        with (self.folder / "log").open("a") as log:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"PAGER_SECRET": SECRET},
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready "), (self.folder / "log").read_text()[-3000:]

    def kill(self) -> None:
        """SIGKILL: nothing is saved or flushed any more."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def get(self, path: str) -> Any:
        """The JSON of a GET that must succeed."""
        got = self.http.get(path)
        assert got.status_code == 200, got.text
        return got.json()

    def ask(self, user: str | None = None) -> str:
        """One completion of a user, by default of one never seen; the arm that answered."""
        number = next(self.users)
        body = {
            "model": "tiny",
            "prompt": f"user {number} wants a story",
            "user": user or f"user-{number}",
            "max_tokens": 40,
            "temperature": 0,
            "ignore_eos": True,
        }
        got = self.http.post("/v1/completions", json=body)
        assert got.status_code == 200, got.text
        arm: str = got.json()["routing"]["arm"]
        return arm

    def load_until(self, done: Callable[[dict[str, Any]], bool], rollout: str) -> None:
        """Requests of new users, several at a time, until the rollout is as wanted."""
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            for _ in range(MOST_REQUESTS // AT_A_TIME):
                list(pool.map(lambda _: self.ask(), range(AT_A_TIME)))
                if done(self.get(f"/v1/rollouts/{rollout}")):
                    return
        pytest.fail(f"after {MOST_REQUESTS} requests: {self.get(f'/v1/rollouts/{rollout}')}")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture
def gateway(tmp_path: Path, receiver: Receiver) -> Iterator[Gateway]:
    gateway = Gateway(tmp_path, receiver)
    gateway.start()
    yield gateway
    gateway.kill()
    gateway.http.close()


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    """Until something another process does is there."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def is_alert(body: dict[str, Any], status: str) -> bool:
    """Whether a message tells of the rolled back canary in this state."""
    return body.get("status") == status and body["groupLabels"]["alertname"] == "CanaryRolledBack"


@pytest.mark.parametrize("killed", [False, True], ids=["alive", "killed"])
def test_a_bad_canary_rolls_itself_back_and_pages(gateway: Gateway, receiver: Receiver, killed: bool) -> None:
    body = {"name": "bad", "canary": CANARY, "weight": 0.5, "steps": [0.5]}
    started = gateway.http.post("/v1/rollouts", json=body)
    assert started.status_code == 201, started.text
    salt = started.json()["salt"]

    if killed:
        gateway.load_until(lambda rollout: rollout["units"]["canary"] >= 15, "bad")
        before = gateway.get("/v1/rollouts/bad")
        assert before["verdict"] == "progressing", "there is a half way"
        gateway.kill()
        gateway.start()
        after = gateway.get("/v1/rollouts/bad")
        assert (after["verdict"], after["salt"], after["weight"]) == ("progressing", salt, 0.5)

    gateway.load_until(lambda rollout: rollout["verdict"] == "rolled_back", "bad")
    ended = gateway.get("/v1/rollouts/bad")
    assert ended["salt"] == salt
    assert [line["event"] for line in ended["history"]] == ["started", "rolled_back"]
    assert sum(ended["units"].values()) <= 400

    wait_for(lambda: any(is_alert(seen, "firing") for seen in receiver.seen()), "the page is attempted")
    if killed:
        # It has failed at most twice: the message is still in the outbox.
        gateway.kill()
        gateway.start()
        assert gateway.get("/v1/rollouts/bad")["verdict"] == "rolled_back"

    # Every user there was, on either arm before.
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        arms = Counter(pool.map(lambda i: gateway.ask(f"user-{i}"), range(48)))
    assert arms == {"stable": 48}

    wait_for(lambda: any(is_alert(taken, "firing") for taken in receiver.taken()), "the page is accepted")
    (page,) = [taken for taken in receiver.taken() if is_alert(taken, "firing")]
    (alert,) = page["alerts"]
    links = {name: url for name, url in alert["annotations"].items() if url.startswith("http")}
    assert {"trace_1", "trace_2", "trace_3", "advisor", "rollout"} == set(links)
    for url in (*links.values(), alert["generatorURL"], page["externalURL"]):
        assert httpx.get(url, trust_env=False).status_code == 200, url
    for name in ("trace_1", "trace_2", "trace_3"):
        trace = httpx.get(links[name], trust_env=False).json()
        assert trace["arm"] == "canary"

    # The next rollout ends the alert of the last one.
    assert gateway.http.post("/v1/rollouts", json=body | {"name": "next"}).status_code == 201
    assert gateway.http.post("/v1/rollouts/next/abort").status_code == 200
    wait_for(lambda: any(is_alert(taken, "resolved") for taken in receiver.taken()), "the all-clear")
    wait_for(
        lambda: all(d["state"] == "delivered" for d in gateway.get("/v1/webhooks/deliveries")["data"]),
        "an empty outbox",
    )

    changes = Counter(
        (change["name"], change["fingerprint"], change["state"])
        for change in gateway.get("/v1/alerts")["history"]
    )
    told = Counter(
        (taken["groupLabels"]["alertname"], alert["fingerprint"], alert["status"])
        for taken in receiver.taken()
        if "alerts" in taken
        for alert in taken["alerts"]
    )
    assert told == changes
    assert set(changes.values()) == {1}
    events = Counter((t["name"], t["metadata"]["event"]) for t in receiver.taken() if "alerts" not in t)
    assert events == Counter(
        [("bad", "started"), ("bad", "rolled_back"), ("next", "started"), ("next", "aborted")]
    )
    assert any(status == 503 for *_, status in receiver.attempts)

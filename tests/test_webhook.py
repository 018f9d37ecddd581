"""Deliveries: signed, retried, never lost, never sent where they must not go."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import duckdb
import httpx
import msgspec
import pytest
from fakes import Clock
from standardwebhooks import Webhook, WebhookVerificationError

from alerts.config import AlertsConfig
from alerts.lifecycle import Alerts, Notification
from alerts.post import Answer, Refused, check_address, post
from alerts.rollout import Transition
from alerts.rules import Finding
from alerts.store import Store
from alerts.webhook import Webhooks, endpoint, retry_delay
from logs import schema

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@dataclass
class Receiver:
    """A webhook receiver on loopback that answers by a script, then with 200."""

    script: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    got: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    arrived: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    hold: threading.Event | None = None
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    @property
    def ids(self) -> list[str]:
        return [headers["webhook-id"] for _, headers, _ in self.got]


@contextmanager
def receiver(**keys: Any) -> Iterator[Receiver]:
    state = Receiver(**keys)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            state.got.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            state.arrived.release()
            if state.hold is not None:
                state.hold.wait(10)
            status, headers = state.script.pop(0) if state.script else (200, {})
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        if state.hold is not None:
            state.hold.set()
        server.shutdown()
        thread.join()
        server.server_close()


def tape(path: Path | None = None) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(str(path) if path else ":memory:")
    schema.migrate(connection)
    return connection


def config(*receivers: dict[str, Any], **keys: Any) -> AlertsConfig:
    return msgspec.convert({"receivers": list(receivers), **keys}, AlertsConfig)


def hook(url: str, name: str = "ops", **keys: Any) -> dict[str, Any]:
    return {"name": name, "kind": "webhook", "url": url, "allow_private": True, "secret_env": "S", **keys}


def notification(name: str = "A", resolved: bool = False) -> Notification:
    alerts = Alerts()
    (first,) = alerts.update([Finding(name, "it happens", "numbers")], 1000.0)[1]
    return alerts.update([], 1001.0)[1][0] if resolved else first


class Wire:
    """Stands in for the network: answers by a script, remembers what was sent."""

    def __init__(self, *script: Answer | Exception) -> None:
        self.script = list(script)
        self.sent: list[tuple[str, dict[str, str], Any]] = []

    def __call__(self, url: str, content: bytes, headers: Any, **_: Any) -> Answer:
        self.sent.append((url, dict(headers), json.loads(content)))
        answer = self.script.pop(0) if self.script else Answer(200, None, "")
        if isinstance(answer, Exception):
            raise answer
        return answer


def answer(status: int, retry_after: str | None = None) -> Answer:
    return Answer(status, retry_after, "said")


@dataclass
class Sender:
    """A sender under test, its clock, store and wire."""

    clock: Clock
    store: Store
    wire: Wire
    webhooks: Webhooks


def sender(
    *script: Answer | Exception, connection: Any = None, settings: AlertsConfig | None = None
) -> Sender:
    clock = Clock(now=time.time())
    store = Store((connection or tape()).cursor)
    wire = Wire(*script)
    settings = settings or config(hook("https://hooks.example/x"))
    webhooks = Webhooks(
        store, settings, {r.name: SECRET for r in settings.receivers if r.secret_env},
        clock=clock, send=wire, jitter=lambda: 1.0,
    )  # fmt: skip
    return Sender(clock, store, wire, webhooks)


# --- delivery ---


def test_fails_twice_then_delivered_once_verified() -> None:
    with receiver(script=[(500, {}), (503, {})]) as ops:
        clock = Clock(now=time.time())
        store = Store(tape().cursor)
        webhooks = Webhooks(store, config(hook(ops.url)), {"ops": SECRET}, clock=clock, jitter=lambda: 1.0)
        webhooks.notify(notification(), "http://gw")
        waits = []
        while webhooks.deliver_next("ops") or store.next_try("ops") is not None:
            if (due := store.next_try("ops")) is not None:
                waits.append(due - clock.now)
                clock.now = due
    assert waits == pytest.approx([1.0, 2.0], abs=1e-3)
    assert len(ops.got) == 3
    assert len(set(ops.ids)) == 1
    for _, headers, body in ops.got:
        verified = Webhook(SECRET).verify(body, headers)
        assert verified["receiver"] == "ops"
        assert verified["version"] == "4"
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET).verify(ops.got[0][2] + b" ", ops.got[0][1])
    (delivery,) = store.deliveries(10)
    assert (delivery.state, delivery.attempts, delivery.status, delivery.error) == ("delivered", 3, 200, None)
    assert webhooks.outcomes == {"retried": 2, "delivered": 1}


def test_a_restart_delivers_what_was_pending(tmp_path: Path) -> None:
    first = tape(tmp_path / "t.duckdb")
    before = sender(httpx.ConnectError("refused"), connection=first)
    before.webhooks.notify(notification(), "http://gw")
    assert before.webhooks.deliver_next("ops")
    first.close()
    after = sender(connection=tape(tmp_path / "t.duckdb"))
    after.clock.now += 10
    assert after.webhooks.deliver_next("ops")
    assert after.wire.sent[0][1]["webhook-id"] == before.wire.sent[0][1]["webhook-id"]
    assert not after.webhooks.deliver_next("ops")


@pytest.mark.parametrize("left", [[], [hook("https://h.example/", "new")]])
def test_a_receiver_that_is_gone_from_the_config_gets_nothing(left: list[dict[str, Any]]) -> None:
    connection = tape()
    sender(connection=connection).webhooks.notify(notification(), "http://gw")
    after = sender(connection=connection, settings=config(*left))
    after.webhooks.start()
    after.webhooks.stop()
    (delivery,) = after.store.deliveries(10)
    assert (delivery.state, delivery.error) == ("failed", "no receiver of this name")
    assert after.wire.sent == []


def test_handing_over_twice_is_one_delivery() -> None:
    one = sender()
    told = notification()
    one.webhooks.notify(told, "http://gw")
    one.webhooks.notify(told, "http://gw")
    assert len(one.store.deliveries(10)) == 1


def test_given_up_when_too_old() -> None:
    one = sender(*[answer(500)] * 100, settings=config(hook("https://hooks.example/x"), give_up_s=3600))
    one.webhooks.notify(notification(), "http://gw")
    began = one.clock.now
    while (due := one.store.next_try("ops")) is not None:
        one.clock.now = due
        one.webhooks.deliver_next("ops")
    assert 3000 < one.clock.now - began <= 3600
    assert one.store.deliveries(1)[0].state == "failed"
    assert one.webhooks.outcomes["failed"] == 1


def test_410_disables_until_somebody_redelivers() -> None:
    connection = tape()
    one = sender(answer(410), connection=connection)
    for name in ("A", "B"):
        one.webhooks.notify(notification(name), "http://gw")
        one.clock.now += 1
    assert one.webhooks.deliver_next("ops")
    assert not one.webhooks.deliver_next("ops")
    assert {d.state for d in one.store.deliveries(10)} == {"disabled"}
    again = sender(connection=connection)
    again.webhooks.notify(notification("C"), "http://gw")
    assert not again.webhooks.deliver_next("ops")
    assert again.wire.sent == []
    last = again.store.deliveries(1)[0]
    assert again.webhooks.redeliver(last.id)
    assert again.webhooks.deliver_next("ops")
    assert again.wire.sent[0][1]["webhook-id"] == last.id
    again.webhooks.notify(notification("D"), "http://gw")
    assert again.webhooks.deliver_next("ops")
    assert not again.webhooks.redeliver("nothing")


@pytest.mark.parametrize(
    ("attempts", "retry_after", "jitter", "expected"),
    [
        (0, None, 1.0, 1.0),
        (0, None, 0.0, 0.5),
        (3, None, 1.0, 8.0),
        (40, None, 1.0, 300.0),
        (0, "120", 1.0, 120.0),
        (0, "0", 1.0, 1.0),
        (0, "999999999999999999", 1.0, 3600.0),
        (0, "soon", 1.0, 1.0),
        (0, "-5", 1.0, 1.0),
        (0, format_datetime(datetime.fromtimestamp(1060, UTC), usegmt=True), 1.0, 60.0),
    ],
)
def test_retry_delay(attempts: int, retry_after: str | None, jitter: float, expected: float) -> None:
    assert retry_delay(attempts, retry_after, 1000.0, jitter) == pytest.approx(expected)


def test_retry_after_is_waited_out() -> None:
    one = sender(answer(429, "77"))
    one.webhooks.notify(notification(), "http://gw")
    one.webhooks.deliver_next("ops")
    assert one.store.next_try("ops") == pytest.approx(one.clock.now + 77)


def test_resolved_goes_only_to_those_who_want_it() -> None:
    settings = config(hook("https://a.example/"), hook("https://b.example/", "quiet", send_resolved=False))
    one = sender(settings=settings)
    one.webhooks.notify(notification(resolved=True), "http://gw")
    assert [d.receiver for d in one.store.deliveries(10)] == ["ops"]


def test_slack_and_pagerduty_get_their_own_shapes_and_secrets_stay_off_the_tape() -> None:
    connection = tape()
    slack_url = "https://hooks.slack.example/services/T0/B0/secretpath"
    settings = config(
        {"name": "s", "kind": "slack", "url": slack_url},
        {"name": "p", "kind": "pagerduty", "secret_env": "KEY"},
    )
    one = sender(settings=settings, connection=connection)
    one.webhooks.notify(notification(), "http://gw")
    assert one.webhooks.deliver_next("s")
    assert one.webhooks.deliver_next("p")
    (slack_to, slack_headers, slack_body), (pd_to, _, pd_body) = one.wire.sent
    assert (slack_to, "attachments" in slack_body) == (slack_url, True)
    assert "webhook-id" not in slack_headers
    assert pd_to == "https://events.pagerduty.com/v2/enqueue"
    assert (pd_body["routing_key"], pd_body["event_action"]) == (SECRET, "trigger")
    stored = str(connection.execute("SELECT * FROM deliveries").fetchall())
    assert SECRET not in stored
    assert "secretpath" not in stored
    assert endpoint(slack_url).startswith("hooks.slack.example#")


def test_rollout_events_go_where_they_are_wanted_once() -> None:
    one = sender(
        settings=config(hook("https://a.example/"), hook("https://b.example/", "flagger", events=True))
    )
    transition = Transition(1.0, "rolled_back", "rolled_back", 0, 0.0, False, "worse", 60, 61, 33.0)
    for _ in range(2):
        one.webhooks.announce("cheap", "salt", 3, transition)
    assert [d.receiver for d in one.store.deliveries(10)] == ["flagger"]
    one.webhooks.deliver_next("flagger")
    assert one.wire.sent[0][2]["phase"] == "Failed"


@pytest.mark.parametrize(
    ("said", "approved"),
    [(answer(200), True), (answer(204), True), (answer(403), False), (httpx.ReadTimeout("slow"), False)],
)
def test_the_gate(said: Answer | Exception, approved: bool) -> None:
    one = sender(said, settings=config(hook("https://gate.example/"), gate="ops"))
    verdict, why = one.webhooks.ask_gate("cheap", {"units": {}, "evidence": {}})
    assert verdict is approved
    assert bool(why) is not approved
    assert one.wire.sent[0][1]["webhook-signature"].startswith("v1,")


# --- threads ---


def test_a_receiver_that_hangs_delays_nobody_else() -> None:
    with receiver(hold=threading.Event()) as stuck, receiver() as fine:
        settings = config(hook(stuck.url, "stuck"), hook(fine.url, "fine"), timeout_s=5)
        webhooks = Webhooks(Store(tape().cursor), settings, {"stuck": SECRET, "fine": SECRET})
        webhooks.start()
        began = time.perf_counter()
        for name in ("A", "B", "C"):
            webhooks.notify(notification(name), "http://gw")
        handed_over = time.perf_counter() - began
        for _ in range(3):
            assert fine.arrived.acquire(timeout=5)
        assert stuck.hold is not None
        stuck.hold.set()
        webhooks.stop()
    assert handed_over < 1.0
    assert len(set(fine.ids)) == 3


def test_a_silent_receiver_times_out() -> None:
    with receiver(hold=threading.Event()) as stuck, pytest.raises(httpx.ReadTimeout):
        post(stuck.url, b"{}", {}, allow_private=True, timeout_s=0.1)


# --- where requests must not go ---


@pytest.mark.parametrize(
    ("address", "public", "private"),
    [
        ("93.184.216.34", True, True),
        ("2606:2800:220:1:248:1893:25c8:1946", True, True),
        ("127.0.0.1", False, True),
        ("10.1.2.3", False, True),
        ("192.168.0.1", False, True),
        ("100.64.0.1", False, True),
        ("::1", False, True),
        ("fd00::1", False, True),
        ("::ffff:10.0.0.1", False, True),
        ("64:ff9b::a00:1", False, True),
        ("169.254.169.254", False, False),
        ("::ffff:169.254.169.254", False, False),
        ("64:ff9b::a9fe:a9fe", False, False),
        ("fe80::1%eth0", False, False),
        ("0.0.0.0", False, False),
        ("::", False, False),
        ("224.0.0.1", False, False),
        ("ff02::1", False, False),
    ],
)
def test_addresses(address: str, public: bool, private: bool) -> None:
    for allow_private, allowed in ((False, public), (True, private)):
        if allowed:
            check_address(address, allow_private)
        else:
            with pytest.raises(Refused):
                check_address(address, allow_private)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]"])
def test_loopback_by_any_name_gets_no_request(host: str) -> None:
    with receiver() as victim, pytest.raises((Refused, OSError)):
        post(f"http://{host}:{victim.port}/", b"{}", {}, allow_private=False, timeout_s=2)
    assert victim.got == []


def test_the_checked_address_is_the_one_that_is_called() -> None:
    """DNS that answers differently the second time changes nothing: there is no second time."""
    with receiver() as ops:
        answers = [["127.0.0.1"], ["169.254.169.254"]]
        asked = []

        def rebinding(host: str, port: int) -> list[str]:
            asked.append((host, port))
            return answers.pop(0)

        url = f"http://hooks.example:{ops.port}/hook?a=1"
        assert post(url, b"{}", {}, allow_private=True, timeout_s=5, resolver=rebinding).status == 200
        with pytest.raises(Refused):
            post(url, b"{}", {}, allow_private=True, timeout_s=5, resolver=rebinding)
    assert asked == [("hooks.example", ops.port)] * 2
    ((path, headers, _),) = ops.got
    assert path == "/hook?a=1"
    assert headers["host"] == f"hooks.example:{ops.port}"


def test_tls_must_prove_the_name_in_the_url() -> None:
    """The connection goes to the checked address, and still asks for, and checks, the URL's host."""
    names: list[str | None] = []
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(Path(__file__).parent / "data" / "hooks.example.pem")
    tls.sni_callback = lambda _socket, name, _context: names.append(name)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            connection, _ = listener.accept()
            with contextlib.suppress(OSError), tls.wrap_socket(connection, server_side=True):
                pass
            connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            post(
                f"https://hooks.example:{port}/", b"{}", {}, allow_private=True, timeout_s=5,
                resolver=lambda *_: ["127.0.0.1"],
            )  # fmt: skip
        thread.join()
    assert names == ["hooks.example"]


def test_one_private_address_among_public_ones_is_refused() -> None:
    with receiver() as victim, pytest.raises(Refused):
        post(
            f"http://mixed.example:{victim.port}/", b"{}", {}, allow_private=False, timeout_s=2,
            resolver=lambda *_: ["93.184.216.34", "127.0.0.1"],
        )  # fmt: skip
    assert victim.got == []


def test_the_next_address_is_tried_where_one_does_not_answer() -> None:
    with receiver() as ops:
        got = post(
            f"http://two.example:{ops.port}/", b"{}", {}, allow_private=True, timeout_s=5,
            resolver=lambda *_: ["127.0.0.2", "127.0.0.1"],
        )  # fmt: skip
    assert got.status == 200


def test_redirects_are_not_followed() -> None:
    with receiver() as victim, receiver(script=[(302, {"location": victim.url})]) as ops:
        answered = post(ops.url, b"{}", {}, allow_private=True, timeout_s=5)
    assert answered.status == 302
    assert victim.got == []


def test_a_redirect_is_a_failed_attempt() -> None:
    with receiver(script=[(307, {"location": "http://169.254.169.254/latest/meta-data"})]) as ops:
        clock, store = Clock(now=time.time()), Store(tape().cursor)
        webhooks = Webhooks(store, config(hook(ops.url)), {"ops": SECRET}, clock=clock)
        webhooks.notify(notification(), "http://gw")
        webhooks.deliver_next("ops")
    (delivery,) = store.deliveries(1)
    assert (delivery.state, delivery.status) == ("pending", 307)
    assert len(ops.got) == 1


def test_a_refused_address_is_tried_again_later_and_said() -> None:
    clock, store = Clock(now=time.time()), Store(tape().cursor)
    settings = config({**hook("http://127.0.0.1:9/"), "allow_private": False})
    webhooks = Webhooks(store, settings, {"ops": SECRET}, clock=clock)
    webhooks.notify(notification(), "http://gw")
    webhooks.deliver_next("ops")
    (delivery,) = store.deliveries(1)
    assert delivery.state == "pending"
    assert delivery.error is not None
    assert "127.0.0.1" in delivery.error


def test_the_environments_proxy_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiver() as proxy, receiver() as ops:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        assert post(ops.url, b"{}", {}, allow_private=True, timeout_s=5).status == 200
    assert proxy.got == []


def test_a_large_answer_is_not_read_to_its_end() -> None:
    class Endless(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            try:
                for _ in range(100_000):
                    self.wfile.write(b"x" * 10_000)
            except OSError:
                self.server.cut_off = True  # type: ignore[attr-defined]

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        got = post(f"http://127.0.0.1:{server.server_port}/", b"{}", {}, allow_private=True, timeout_s=5)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert len(got.text) <= 2048
    assert server.cut_off  # type: ignore[attr-defined]

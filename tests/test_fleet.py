"""Two gateways and their control, killed and restarted in turn under load: one tape afterwards."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from process import Serving, free_port

from alerts.rollout import arm_of
from gateway import cli

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

KEY = "tt-fleet-test"
HEADERS = {"authorization": f"Bearer {KEY}"}
NAMES = ("control", "east", "west")
ROLLOUT = {
    "name": "looser", "canary": {"threshold": 0.3}, "weight": 0.5, "steps": [0.5], "min_units": 100_000,
    "min_step_s": 0.0,
}  # fmt: skip


class Member:
    """One gateway of the fleet, on a port of its own for life."""

    def __init__(self, folder: Path, name: str, control: str | None) -> None:
        self.name = name
        self.folder = folder / name
        self.folder.mkdir()
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        config = self.folder / "config.toml"
        follow = f'control = "{control}"\n' if control else ""
        config.write_text(
            f'[fleet]\nname = "{name}"\nshare = "{folder / "share"}"\nclose_s = 2.0\nsilent_s = 300.0\n'
            f"{follow}[engine]\nmax_model_len = 512\n[alerts]\ninterval_s = 0.2\n"
        )
        self.config = config
        self.start()

    def start(self) -> None:
        """Start, or start again."""
        self.process = Serving(
            self.folder / "data", "--no-ui", "--config", str(self.config), "--port", str(self.port)
        )

    def get(self, path: str) -> Any:
        """A GET that must succeed."""
        answer = httpx.get(self.url + path, headers=HEADERS, timeout=60, trust_env=False)
        return answer.raise_for_status().json()


@contextmanager
def fleet(folder: Path) -> Iterator[dict[str, Member]]:
    """control, and east and west that follow it."""
    members: dict[str, Member] = {}
    try:
        for name in NAMES:
            control = members["control"].url if members else None
            members[name] = Member(folder, name, control)
        yield members
    finally:
        for member in members.values():
            member.process.stop()


class Load:
    """Clients that go from gateway to gateway and write down what they got."""

    def __init__(self, members: dict[str, Member]) -> None:
        self.members = members
        self.numbers = itertools.count()
        self.done: dict[str, tuple[str, str, str, str]] = {}
        self.at: dict[str, float] = {}
        self.failed: dict[str, tuple[str, float, float]] = {}
        self.lock = threading.Lock()
        self.stopped = threading.Event()
        self.threads = [threading.Thread(target=self._run, args=(name,)) for name in NAMES for _ in range(2)]
        for thread in self.threads:
            thread.start()

    def _run(self, first: str) -> None:
        for name in itertools.cycle([first, *(n for n in NAMES if n != first)]):
            if self.stopped.is_set():
                return
            self._ask(name)

    def _ask(self, name: str) -> None:
        number = next(self.numbers)
        trace, user = f"t-{number}", f"user-{number % 20}"
        sent = time.monotonic()
        try:
            answer = _ask(self.members[name], trace, user)
            if answer.status_code == 503:
                # Listening again, its models not loaded yet.
                answer.raise_for_status()
        except httpx.HTTPError:
            with self.lock:
                self.failed[trace] = (name, sent, time.monotonic())
            time.sleep(0.05)
            return
        assert answer.status_code == 200, answer.text
        body = answer.json()
        served = answer.headers["x-tokentape-gateway"]
        with self.lock:
            self.done[trace] = served, user, body["routing"]["arm"], body["choices"][0]["text"]
            self.at[trace] = time.monotonic()

    def stop(self) -> None:
        self.stopped.set()
        for thread in self.threads:
            thread.join()


def _ask(member: Member, trace: str, user: str) -> httpx.Response:
    body = {"model": "tiny", "prompt": f"{trace} is", "max_tokens": 16, "seed": 1, "user": user}
    headers = {**HEADERS, "x-request-id": trace}
    return httpx.post(f"{member.url}/v1/completions", json=body, headers=headers, timeout=60, trust_env=False)


def wait_until(what: Callable[[], bool], seconds: float = 60.0) -> None:
    """Poll until it holds."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_killed_and_restarted_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKENTAPE_API_KEY", KEY)
    monkeypatch.setenv("TOKENTAPE_CONTROL_KEY", KEY)
    down: list[tuple[str, float, float]] = []
    with fleet(tmp_path) as members:
        control = members["control"]
        answer = httpx.post(
            f"{control.url}/v1/rollouts", json=ROLLOUT, headers=HEADERS, timeout=30, trust_env=False
        )
        salt = answer.raise_for_status().json()["salt"]
        started = control.get("/v1/rollouts/looser")["started"]
        # Followers pass reads on, refuse writes by name, and cannot be followed themselves.
        assert members["east"].get("/v1/rollouts")["data"][0]["salt"] == salt
        for method, path in (
            ("POST", "/v1/rollouts"),
            ("POST", "/v1/rollouts/looser/abort"),
            ("GET", "/v1/fleet"),
        ):
            body = ROLLOUT if path == "/v1/rollouts" else None
            refused = httpx.request(
                method, members["east"].url + path, json=body, headers=HEADERS, trust_env=False
            )
            assert refused.status_code == 409
            assert control.url in refused.json()["error"]["message"]
        wait_until(lambda: _followed(members))

        load = Load(members)
        for name in NAMES:
            time.sleep(1.0)
            member, at = members[name], time.monotonic()
            member.process.kill()
            member.start()
            down.append((name, at, time.monotonic()))
        time.sleep(1.0)
        load.stop()

        # Only what was on a gateway while it was down is lost.
        for trace, (name, sent, failed) in load.failed.items():
            assert any(n == name and sent <= until and failed >= at for n, at, until in down), trace
        assert len(load.done) > 50
        # One arm a user, by the same salt everywhere; the rollout went on as it was.
        assert {arm for _, _, arm, _ in load.done.values()} == {"stable", "canary"}
        for served, user, arm, _ in load.done.values():
            assert arm == arm_of(salt, user, 0.5), (served, user)
        rollout = control.get("/v1/rollouts/looser")
        assert (rollout["salt"], rollout["started"], rollout["verdict"]) == (salt, started, "progressing")
        assert [t["event"] for t in rollout["history"]] == ["started"]

        # Traces are closed and sent; then each gateway has all of them, as they were told to the clients, but
        # for what a kill may take: what was answered in the second before it.
        told = {
            trace: (served, text)
            for trace, (served, _, _, text) in load.done.items()
            if not any(n == served and at - 1.0 < load.at[trace] <= until for n, at, until in down)
        }
        assert len(told) > len(load.done) * 0.8

        def everywhere() -> bool:
            return all(_ids(member) >= told.keys() for member in members.values())

        wait_until(everywhere, 180.0)
        listed = _listed(control)
        # The tape's text is that of all tokens, the end of the turn among them.
        kept = {t: (listed[t]["gateway"], listed[t]["answer_text"].removesuffix("<|im_end|>")) for t in told}
        assert kept == told
        assert set(NAMES) == {row["gateway"] for row in listed.values()}
        for member in members.values():
            assert cli.main(["replay", "--all", "--url", member.url]) == 0
            assert capsys.readouterr().out.endswith(", 0 mismatches\n")
        # The evidence of the control comes from all gateways: users of which some were served elsewhere only.
        assert sum(control.get("/v1/rollouts/looser")["units"].values()) > 0

        # A trace that is still open elsewhere: the refusal says where to ask.
        missing = httpx.get(f"{members['east'].url}/v1/traces/none", headers=HEADERS, trust_env=False)
        assert missing.status_code == 404
        assert "x-tokentape-gateway" in missing.json()["error"]["message"]

        # Without the control, and after too long a silence, everybody is on stable; and it is said.
        members["control"].process.kill()
        east = members["east"]
        east.process.stop()
        east.config.write_text(east.config.read_text().replace("silent_s = 300.0", "silent_s = 3.0"))
        east.start()
        wait_until(lambda: _alert(east) == ["ControlSilent"])
        arms = [_ask(east, f"s-{i}", f"user-{i}").json()["routing"]["arm"] for i in range(20)]
        assert set(arms) == {"stable"}
    # The share alone is the tape of all.
    assert cli.main(["replay", "--all", "--data-dir", str(tmp_path / "share")]) == 0
    assert capsys.readouterr().out.endswith(", 0 mismatches\n")


def _followed(members: dict[str, Member]) -> bool:
    files = [members[name].folder / "data" / "followed.json" for name in ("east", "west")]
    return all(file.exists() and "looser" in file.read_text() for file in files)


def _ids(member: Member) -> set[str]:
    return set(_listed(member))


def _listed(member: Member) -> dict[str, dict[str, Any]]:
    found, cursor = {}, None
    while True:
        page = member.get("/v1/traces?limit=500" + (f"&cursor={cursor}" if cursor else ""))
        for row in page["data"]:
            found[row["id"]] = row | {"answer_text": row["answer_preview"]}
        cursor = page["next_cursor"]
        if cursor is None:
            return found


def _alert(member: Member) -> list[str]:
    return [a["name"] for a in member.get("/v1/alerts")["data"] if a["state"] == "firing"]

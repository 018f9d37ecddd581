"""A gateway that follows another's rollouts: it asks over HTTP and remembers the answer.

The last orders hold for `silent_s` after they were last heard, across a restart too; then everybody here is
on stable, the last one heard, until the control speaks again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import structlog

from alerts.orders import BadOrders, Orders
from alerts.state import StateDamaged, StateFile

FOLLOWED_FILE = "followed.json"
MOST_BYTES = 16 * 2**20
"""Longest answer that is read; a learned router of a thousand units takes a tenth of it."""
MOST_WAIT_S = 20.0
RETRY_S = 1.0
STOP_S = 1.0

log = structlog.get_logger("alerts.follow")


class ControlAway(Exception):
    """The control does not answer, or not as one; the message names it and says why."""


@dataclass(frozen=True, slots=True)
class Control:
    """Whom to follow. url: http(s)://host:port. key: API key. silent_s: silence after which stable holds."""

    url: str
    key: str | None = None
    silent_s: float = 60.0


class Follower:
    """Keeps `apply` told of the control's orders, on a thread of its own."""

    def __init__(
        self,
        control: Control,
        data_dir: Path,
        apply: Callable[[Orders], None],
        clock: Callable[[], float] = time.time,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """apply: gets orders whenever they change; from here with those on disk, while they still hold."""
        self.control = control
        self.heard: float | None = None
        self._state = StateFile(data_dir / FOLLOWED_FILE)
        self._apply = apply
        self._clock = clock
        self._orders: Orders | None = None
        self._fallen = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follow", daemon=True)
        headers = {"authorization": f"Bearer {control.key}"} if control.key else {}
        self._http = httpx.Client(
            base_url=control.url,
            headers=headers,
            transport=transport,
            trust_env=False,
        )
        self._load()

    @property
    def url(self) -> str:
        """Where the control is."""
        return self.control.url

    @property
    def silent(self) -> bool:
        """Whether the control has been silent for too long, or was never heard."""
        return self.heard is None or self._clock() - self.heard >= self.control.silent_s

    def start(self) -> None:
        """Start asking."""
        self._thread.start()

    def stop(self) -> None:
        """End; an answer that the control holds back is not waited for, and changes nothing any more."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S)
        self._http.close()

    def ask(self, path: str) -> Any:
        """The control's JSON for a path; raises ControlAway, for what it refuses too."""
        try:
            return self._get(path, timeout_s=10.0).json()
        except ValueError:
            raise ControlAway(f"{self.control.url} did not answer in JSON") from None

    def rollout(self, name: str | None = None) -> Any:
        """The control's rollouts, or one; raises ControlAway."""
        return self.ask("/v1/rollouts" if name is None else f"/v1/rollouts/{quote(name, safe='')}")

    def poll(self, wait_s: float = 0.0) -> None:
        """Ask once; wait_s: how long the control may hold the answer until something changes.

        Raises ControlAway.
        """
        headers = (
            {"if-none-match": self._orders.etag} if self._orders is not None and not self._fallen else {}
        )
        answer = self._get(f"/v1/fleet?wait_s={wait_s:g}", headers, timeout_s=wait_s + self._slack_s)
        if answer.status_code == 304:
            self._hear(self._orders)
            return
        try:
            orders = Orders.read(answer.content)
        except BadOrders as error:
            raise ControlAway(f"{self.control.url} is no control: {error}") from None
        self._hear(orders)

    def check(self) -> None:
        """Fall back to stable if it is time to."""
        if self._orders is not None and not self._fallen and self.silent:
            self._fallen = True
            log.error("control_silent", control=self.control.url, seconds=self.control.silent_s)
            self._apply(replace(self._orders, split=None))

    @property
    def _slack_s(self) -> float:
        return min(5.0, self.control.silent_s / 3)

    def _hear(self, orders: Orders | None) -> None:
        assert orders is not None, "304 answers only a question that had an ETag"
        if self._stopped.is_set():
            return
        changed = self._orders is None or self._fallen or orders.etag != self._orders.etag
        self.heard, self._orders, self._fallen = self._clock(), orders, False
        if changed:
            log.info("control_heard", control=orders.control, canary=orders.split and orders.split.name)
            self._apply(orders)
        self._state.save({"heard": self.heard, "orders": orders.body.decode()})

    def _get(self, path: str, headers: dict[str, str] | None = None, *, timeout_s: float) -> httpx.Response:
        try:
            with self._http.stream("GET", path, headers=headers, timeout=timeout_s) as answer:
                content = b""
                for chunk in answer.iter_bytes():
                    content += chunk
                    if len(content) > MOST_BYTES:
                        raise ControlAway(f"{self.control.url} answers with more than {MOST_BYTES} bytes")
        except (httpx.HTTPError, httpx.StreamError, RuntimeError) as error:
            raise ControlAway(f"{self.control.url} does not answer: {type(error).__name__} {error}") from None
        if answer.status_code not in (200, 304) or (answer.status_code == 304 and not headers):
            raise ControlAway(f"{self.control.url} answers {answer.status_code}: {content[:200]!r}")
        return httpx.Response(answer.status_code, content=content)

    def _load(self) -> None:
        try:
            state = self._state.load()
            if state is None:
                return
            orders, heard = Orders.read(str(state["orders"]).encode()), float(state["heard"])
        except StateDamaged as error:
            log.error("followed_state_damaged", error=str(error))
            return
        except (KeyError, TypeError, ValueError) as error:
            log.error("followed_state_damaged", error=str(self._state.set_aside(repr(error))))
            return
        # A clock that was set back must not make old orders young.
        self._orders, self.heard = orders, min(heard, self._clock())
        self._fallen = self.silent
        self._apply(replace(orders, split=None) if self._fallen else orders)

    def _run(self) -> None:
        away = False
        wait_s = min(MOST_WAIT_S, self.control.silent_s / 3)
        while not self._stopped.is_set():
            try:
                # The first question is answered at once: where nothing has been heard yet, there is no ETag.
                self.poll(wait_s)
                away = False
            except ControlAway as error:
                if not away and not self._stopped.is_set():
                    log.warning("control_away", error=str(error))
                away = True
            except Exception:
                # A full disk, say: following goes on.
                log.exception("follow_failed")
                away = True
            self.check()
            if away:
                self._stopped.wait(RETRY_S)

"""Deliveries: every notification reaches every receiver at least once, however often either side fails.

The outbox is a table of the tape, so a restart loses nothing; one thread a receiver, so a slow receiver
delays nobody else, and never the decode path. Retries carry the same webhook-id: receivers drop repeats.
"""

from __future__ import annotations

import email.utils
import hashlib
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

import structlog
from standardwebhooks import Webhook

from alerts import messages
from alerts.config import AlertsConfig, ReceiverConfig
from alerts.lifecycle import Notification
from alerts.post import Answer, post
from alerts.rollout import Transition
from alerts.store import DELIVERED, DISABLED, FAILED, PENDING, Delivery, Store

FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 300.0
LONGEST_RETRY_AFTER_S = 3600.0
_IDLE_S = 30.0

log = structlog.get_logger("alerts.webhook")


class Post(Protocol):
    """alerts.post.post, or a test's stand-in."""

    def __call__(
        self,
        url: str,
        content: bytes,
        headers: Mapping[str, str],
        *,
        allow_private: bool,
        timeout_s: float,
    ) -> Answer: ...


class Webhooks:
    """Sends what is in the outbox. `outcomes` counts attempts: delivered, retried, failed, disabled."""

    def __init__(
        self,
        store: Store,
        config: AlertsConfig,
        secrets: Mapping[str, str],
        *,
        clock: Callable[[], float] = time.time,
        send: Post = post,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """secrets: by receiver name (alerts.config.read_secrets). jitter: uniform in [0, 1)."""
        self.config = config
        self.receivers = {receiver.name: receiver for receiver in config.receivers}
        self.outcomes: Counter[str] = Counter()
        self._store = store
        self._secrets = dict(secrets)
        self._clock = clock
        self._send = send
        self._jitter = jitter
        self._wake = threading.Condition()
        self._stopping = False
        self._puts = 0
        self._threads: list[threading.Thread] = []
        self._disabled = {
            receiver.name
            for receiver in config.receivers
            if store.is_disabled(receiver.name, endpoint(receiver.address))
        }

    def start(self) -> None:
        """Begin to send, with what an earlier process left in the outbox."""
        self._store.give_up_on_others(list(self.receivers), self._clock())
        for name, receiver in self.receivers.items():
            if receiver.secret_env is None and receiver.kind == "webhook":
                log.warning("unsigned_receiver", receiver=name)
            thread = threading.Thread(target=self._run, args=(name,), name=f"webhook-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Send nothing more; an attempt under way is left to its own timeout, its delivery stays pending."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def notify(self, notification: Notification, base_url: str) -> None:
        """Put a notification into the outbox of every receiver that wants it; repeating that is harmless."""
        body = {"kind": "alert", **messages.alertmanager(notification, base_url)}
        for name, receiver in self.receivers.items():
            if notification.status == "resolved" and not receiver.send_resolved:
                continue
            self._put(f"{notification.id}_{name}", receiver, notification.group, body)

    def announce(self, rollout: str, salt: str, number: int, transition: Transition) -> None:
        """Put a rollout's transition into the outbox of every receiver that takes events."""
        body = {"kind": "event", **messages.flagger(rollout, transition)}
        for name, receiver in self.receivers.items():
            if receiver.events:
                self._put(f"evt_{salt}_{number}_{name}", receiver, rollout, body)

    def _put(self, id: str, receiver: ReceiverConfig, subject: str, body: Mapping[str, Any]) -> None:
        self._store.put_delivery(id, receiver.name, subject, body, self._clock())
        if receiver.name in self._disabled:
            self._store.disable(receiver.name, self._clock())
        self._nudge()

    def _nudge(self) -> None:
        with self._wake:
            self._puts += 1
            self._wake.notify_all()

    def redeliver(self, id: str) -> bool:
        """Send a delivery again now, its webhook-id unchanged, disabled receiver or not; False if unknown."""
        delivery = self._store.delivery(id)
        if delivery is None or delivery.receiver not in self.receivers:
            return False
        self._disabled.discard(delivery.receiver)
        self._store.requeue(id, self._clock())
        self._nudge()
        return True

    def ask_gate(self, rollout: str, summary: Mapping[str, Any]) -> tuple[bool, str]:
        """Ask the gate whether a rollout may be promoted: 2xx agrees, anything else vetoes; and why."""
        assert self.config.gate is not None
        receiver = self.receivers[self.config.gate]
        content = json.dumps(
            {
                "name": rollout,
                "namespace": "tokentape",
                "phase": "WaitingPromotion",
                "metadata": {"units": summary["units"], "evidence": summary["evidence"]},
            }
        ).encode()
        try:
            answer = self._attempt(receiver, f"gate_{rollout}_{round(self._clock() * 1000)}", content)
        except Exception as error:
            return False, f"{receiver.name} could not be asked ({_describe(error)})"
        if 200 <= answer.status < 300:
            return True, ""
        return False, f"{receiver.name} answered {answer.status}"

    def deliver_next(self, name: str) -> bool:
        """Try the receiver's oldest due delivery; False when none is due."""
        now = self._clock()
        delivery = self._store.due(name, now)
        if delivery is None:
            return False
        receiver = self.receivers[name]
        status: int | None = None
        error: str | None = None
        retry_after: str | None = None
        try:
            answer = self._attempt(receiver, delivery.id, self._render(receiver, delivery.body))
            status, retry_after = answer.status, answer.retry_after
            if not 200 <= status < 300:
                error = f"answered {status}: {answer.text[:200]}"
        except Exception as failure:
            error = _describe(failure)
        self._settle(receiver, delivery, status, error, retry_after)
        return True

    def _settle(
        self,
        receiver: ReceiverConfig,
        delivery: Delivery,
        status: int | None,
        error: str | None,
        retry_after: str | None,
    ) -> None:
        now = self._clock()
        wait = retry_delay(delivery.attempts, retry_after, now, self._jitter())
        if error is None:
            state, outcome = DELIVERED, "delivered"
        elif status == 410:
            state, outcome = DISABLED, "disabled"
        elif now + wait - delivery.created > self.config.give_up_s:
            state, outcome = FAILED, "failed"
        else:
            state, outcome = PENDING, "retried"
        self.outcomes[outcome] += 1
        self._store.attempted(
            delivery.id,
            state,
            now,
            status=status,
            error=error,
            url=endpoint(receiver.address),
            next_try=now + wait,
        )
        if state == DISABLED:
            self._disabled.add(receiver.name)
            self._store.disable(receiver.name, now)
        if error is not None:
            log.warning("delivery_failed", receiver=receiver.name, id=delivery.id, error=error, state=state)

    def _attempt(self, receiver: ReceiverConfig, id: str, content: bytes) -> Answer:
        headers: dict[str, str] = {}
        if receiver.kind == "webhook":
            now = self._clock()
            headers = {"webhook-id": id, "webhook-timestamp": str(int(now))}
            secret = self._secrets.get(receiver.name)
            if secret is not None:
                stamp = datetime.fromtimestamp(int(now), UTC)
                headers["webhook-signature"] = Webhook(secret).sign(id, stamp, content.decode())
        return self._send(
            receiver.address,
            content,
            headers,
            allow_private=receiver.allow_private,
            timeout_s=self.config.timeout_s,
        )

    def _render(self, receiver: ReceiverConfig, stored: Mapping[str, Any]) -> bytes:
        body = {key: value for key, value in stored.items() if key != "kind"}
        if stored["kind"] == "alert":
            if receiver.kind == "slack":
                body = messages.slack(body)
            elif receiver.kind == "pagerduty":
                body = messages.pagerduty(body, self._secrets[receiver.name])
            else:
                body["receiver"] = receiver.name
        return json.dumps(body, ensure_ascii=False, sort_keys=True).encode()

    def _run(self, name: str) -> None:
        while True:
            with self._wake:
                if self._stopping:
                    return
                puts = self._puts
            try:
                tried = self.deliver_next(name)
                upcoming = None if tried else self._store.next_try(name)
            except Exception:
                # The tape may be full or gone; deliveries wait, this thread stays.
                log.exception("outbox_failed", receiver=name)
                tried, upcoming = False, None
            if tried:
                continue
            with self._wake:
                if self._stopping:
                    return
                if self._puts != puts:
                    # Something came while the outbox was looked at.
                    continue
                wait = _IDLE_S if upcoming is None else min(max(upcoming - self._clock(), 0.01), _IDLE_S)
                self._wake.wait(wait)


def retry_delay(attempts: int, retry_after: str | None, now: float, jitter: float) -> float:
    """Seconds until the next attempt: doubling from a second to five minutes, between half and whole of it.

    attempts: how many failed before this one. A Retry-After (seconds or an HTTP date) is waited out if it is
    longer, up to an hour. jitter in [0, 1).
    """
    backoff = min(FIRST_RETRY_S * 2.0 ** min(attempts, 20), LONGEST_RETRY_S) * (0.5 + 0.5 * jitter)
    if retry_after is None:
        return backoff
    text = retry_after.strip()
    if text.isascii() and text.isdigit():
        asked = float(text[:9])
    else:
        try:
            asked = email.utils.parsedate_to_datetime(text).timestamp() - now
        except ValueError:
            return backoff
    return max(backoff, min(asked, LONGEST_RETRY_AFTER_S))


def endpoint(url: str) -> str:
    """A URL as the log may show it: its host and a hash, since paths of webhooks are secrets."""
    host = url.split("://", 1)[-1].split("/", 1)[0]
    return f"{host}#{hashlib.sha256(url.encode()).hexdigest()[:8]}"


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]

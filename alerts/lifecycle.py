"""Alerts over time: pending, firing, resolved; silences, inhibition, grouping and repeats.

Pure: findings and a time in, notifications out. What must be sent is decided here exactly once.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from alerts.plan import FieldError
from alerts.rules import Finding

_KEPT_RESOLVED = 100


@dataclass(slots=True)
class Alert:
    """One alert, from the moment its condition held. Times are Unix seconds.

    state: `pending`, `firing` or `resolved`. notified: when a receiver was last told that it fires.
    """

    name: str
    labels: dict[str, str]
    annotations: dict[str, str]
    state: str
    since: float
    inhibited_by: list[str] = field(default_factory=list)
    fired: float | None = None
    resolved: float | None = None
    notified: float | None = None

    @property
    def fingerprint(self) -> str:
        """16 hex digits naming the alert: equal labels, equal fingerprint."""
        text = "\x00".join(f"{name}\x01{value}" for name, value in sorted(self.labels.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Silence:
    """Alerts whose labels have all of these values are not sent until ends_at (Unix seconds)."""

    id: str
    matchers: Mapping[str, str]
    author: str
    comment: str
    starts_at: float
    ends_at: float

    def covers(self, alert: Alert, now: float) -> bool:
        """Whether the alert is quiet now."""
        return now < self.ends_at and all(alert.labels.get(k) == v for k, v in self.matchers.items())


@dataclass(frozen=True, slots=True)
class Notification:
    """One thing to tell every receiver: a group of alerts of one name. id is the start of webhook-id."""

    id: str
    group: str
    status: str
    alerts: Sequence[Alert]
    created: float


class Alerts:
    """Every alert there is, and who has been told."""

    def __init__(self, repeat_s: float = 14_400.0) -> None:
        """repeat_s: a firing alert is told again after so many seconds."""
        self.repeat_s = repeat_s
        self.alerts: dict[str, Alert] = {}
        self.silences: dict[str, Silence] = {}

    def update(self, findings: Iterable[Finding], now: float) -> tuple[list[Alert], list[Notification]]:
        """The conditions that hold now; the alerts whose state changed, and what is to be sent."""
        changed: list[Alert] = []
        held: set[str] = set()
        for finding in findings:
            alert = self._see(finding, now)
            held.add(alert.fingerprint)
            if alert.state == "pending" and now - alert.since >= finding.for_s:
                alert.state, alert.fired = "firing", now
                changed.append(alert)
        for fingerprint, alert in list(self.alerts.items()):
            if fingerprint in held or alert.state == "resolved":
                continue
            if alert.state == "pending":
                del self.alerts[fingerprint]
                continue
            alert.state, alert.resolved = "resolved", now
            changed.append(alert)
        notifications = self._notify(now)
        self._forget()
        return changed, notifications

    def _see(self, finding: Finding, now: float) -> Alert:
        labels = {**finding.labels, "alertname": finding.name, "severity": finding.severity}
        alert = Alert(finding.name, labels, {}, "pending", now)
        known = self.alerts.get(alert.fingerprint)
        if known is None or known.state == "resolved":
            known = self.alerts[alert.fingerprint] = alert
        known.annotations = {
            "summary": finding.summary,
            "description": finding.description,
            **finding.annotations,
        }
        known.inhibited_by = list(finding.inhibited_by)
        return known

    def _notify(self, now: float) -> list[Notification]:
        firing = {alert.name for alert in self.alerts.values() if alert.state == "firing"}
        due: dict[str, list[Alert]] = {}
        for alert in self.alerts.values():
            if alert.state == "firing":
                if self.silenced_by(alert, now) or firing & set(alert.inhibited_by):
                    continue
                if alert.notified is None or now - alert.notified >= self.repeat_s:
                    due.setdefault(alert.name, []).append(alert)
            # Whoever was paged hears that it is over, silence or not.
            elif alert.state == "resolved" and alert.notified is not None:
                due.setdefault(alert.name, []).append(alert)
        notifications = []
        for name, alerts in due.items():
            also = [
                a
                for a in self.alerts.values()
                if a.name == name and a.state == "firing" and a.notified is not None and a not in alerts
            ]
            group = sorted([*alerts, *also], key=lambda a: (a.since, a.fingerprint))
            status = "firing" if any(a.state == "firing" for a in group) else "resolved"
            copies = [Alert(**asdict(alert)) for alert in group]
            notifications.append(Notification(f"msg_{secrets.token_hex(12)}", name, status, copies, now))
            for alert in alerts:
                alert.notified = now if alert.state == "firing" else None
        return notifications

    def _forget(self) -> None:
        over = [f for f, a in self.alerts.items() if a.state == "resolved" and a.notified is None]
        for fingerprint in over[:-_KEPT_RESOLVED]:
            del self.alerts[fingerprint]

    def silenced_by(self, alert: Alert, now: float) -> list[str]:
        """Ids of the silences that cover the alert now."""
        return [silence.id for silence in self.silences.values() if silence.covers(alert, now)]

    def silence(self, body: object, now: float) -> Silence:
        """Add the silence a client asks for; raises FieldError naming the field.

        Body: matchers {label: value}, author, and either duration_s or ends_at (Unix seconds); comment.
        """
        silence = parse_silence(body, now)
        self.silences[silence.id] = silence
        return silence

    def unsilence(self, silence_id: str) -> Silence | None:
        """End a silence; None if there is none of this id."""
        return self.silences.pop(silence_id, None)

    def view(self, now: float) -> list[dict[str, Any]]:
        """Every alert as `GET /v1/alerts` tells it, firing first, newest first."""
        order = {"firing": 0, "pending": 1, "resolved": 2}
        firing = {alert.name for alert in self.alerts.values() if alert.state == "firing"}
        return [
            {
                **asdict(alert),
                "fingerprint": alert.fingerprint,
                "silenced_by": self.silenced_by(alert, now),
                "inhibited_by": sorted(firing & set(alert.inhibited_by)),
            }
            for alert in sorted(self.alerts.values(), key=lambda a: (order[a.state], -a.since))
        ]

    def to_dict(self) -> dict[str, Any]:
        """The whole state in plain values."""
        return {
            "alerts": [asdict(alert) for alert in self.alerts.values()],
            "silences": [asdict(silence) for silence in self.silences.values()],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `to_dict` wrote down."""
        alerts = [Alert(**entry) for entry in state["alerts"]]
        self.alerts = {alert.fingerprint: alert for alert in alerts}
        self.silences = {entry["id"]: Silence(**entry) for entry in state["silences"]}


def parse_silence(body: object, now: float) -> Silence:
    """A checked silence; raises FieldError naming the field."""
    if not isinstance(body, Mapping):
        raise FieldError("body", "must be a JSON object")
    given = {key: value for key, value in body.items() if value is not None}
    unknown = sorted(set(given) - {"matchers", "author", "comment", "duration_s", "ends_at"})
    if unknown:
        raise FieldError(str(unknown[0]), "unknown field")
    matchers = given.get("matchers")
    if (
        not isinstance(matchers, Mapping)
        or not 1 <= len(matchers) <= 20
        or not all(isinstance(k, str) and isinstance(v, str) for k, v in matchers.items())
    ):
        raise FieldError("matchers", "must be an object of 1 to 20 labels and the values they must have")
    author, comment = given.get("author"), given.get("comment", "")
    if not isinstance(author, str) or not 1 <= len(author) <= 200:
        raise FieldError("author", "must be 1 to 200 characters: who silences")
    if not isinstance(comment, str) or len(comment) > 2000:
        raise FieldError("comment", "must be at most 2000 characters")
    if ("duration_s" in given) == ("ends_at" in given):
        raise FieldError("duration_s", "either duration_s or ends_at must say when the silence ends")
    key = "duration_s" if "duration_s" in given else "ends_at"
    value = given[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FieldError(key, "must be a number of seconds")
    ends_at = float(value) + (now if key == "duration_s" else 0.0)
    if not now < ends_at <= now + 366 * 86400:
        raise FieldError(key, "must end the silence in the future, within a year")
    return Silence(secrets.token_hex(8), dict(matchers), author, comment, now, ends_at)

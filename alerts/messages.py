"""Bodies of notifications: Alertmanager's webhook (version 4), Slack, PagerDuty Events v2, Flagger events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from alerts.lifecycle import Notification
from alerts.rollout import Transition

_NEVER = "0001-01-01T00:00:00Z"
_COLOURS = {"critical": "#D55E00", "warning": "#E69F00", "info": "#0072B2", "resolved": "#009E73"}
_PHASES = {
    "started": "Initialized",
    "promoted": "Succeeded",
    "rolled_back": "Failed",
    "aborted": "Failed",
    "vetoed": "Waiting",
    "inconclusive": "Waiting",
    "paused": "Waiting",
    "no_data": "Waiting",
}


def alertmanager(notification: Notification, base_url: str) -> dict[str, Any]:
    """Prometheus Alertmanager's webhook body, version 4; the receiver's name is filled in when it is sent."""
    alerts = [
        {
            "status": "resolved" if alert.state == "resolved" else "firing",
            "labels": alert.labels,
            "annotations": alert.annotations,
            "startsAt": rfc3339(alert.fired if alert.fired is not None else alert.since),
            "endsAt": rfc3339(alert.resolved) if alert.resolved is not None else _NEVER,
            "generatorURL": f"{base_url}/v1/alerts",
            "fingerprint": alert.fingerprint,
        }
        for alert in notification.alerts
    ]
    return {
        "version": "4",
        "groupKey": f'{{}}:{{alertname="{notification.group}"}}',
        "truncatedAlerts": 0,
        "status": notification.status,
        "receiver": "",
        "groupLabels": {"alertname": notification.group},
        "commonLabels": _common([alert.labels for alert in notification.alerts]),
        "commonAnnotations": _common([alert.annotations for alert in notification.alerts]),
        "externalURL": base_url,
        "alerts": alerts,
    }


def slack(body: Mapping[str, Any]) -> dict[str, Any]:
    """A Slack incoming-webhook message of an Alertmanager body."""
    attachments = []
    for alert in body["alerts"]:
        severity = "resolved" if alert["status"] == "resolved" else alert["labels"].get("severity", "warning")
        notes = alert["annotations"]
        links = [f"<{url}|{name}>" for name, url in _links(notes)]
        attachments.append(
            {
                "color": _COLOURS.get(severity, _COLOURS["warning"]),
                "title": _escape(f"[{alert['status'].upper()}] {alert['labels']['alertname']}"),
                "text": "\n".join([_escape(notes["summary"]), _escape(notes["description"]), *links]),
                "fallback": _escape(notes["summary"]),
            }
        )
    return {
        "text": _escape(f"{body['groupLabels']['alertname']}: {body['status']}"),
        "attachments": attachments,
    }


def pagerduty(body: Mapping[str, Any], routing_key: str) -> dict[str, Any]:
    """A PagerDuty Events API v2 event of an Alertmanager body: one incident a group."""
    alert = next((a for a in body["alerts"] if a["status"] == body["status"]), body["alerts"][0])
    event: dict[str, Any] = {
        "routing_key": routing_key,
        "event_action": "trigger" if body["status"] == "firing" else "resolve",
        "dedup_key": f"tokentape/{body['groupLabels']['alertname']}",
    }
    if body["status"] == "firing":
        event |= {
            "payload": {
                "summary": alert["annotations"]["summary"][:1024],
                "source": body["externalURL"],
                "severity": alert["labels"].get("severity", "warning"),
                "timestamp": alert["startsAt"],
                "component": "tokentape",
                "class": alert["labels"]["alertname"],
                "custom_details": {"labels": alert["labels"], "annotations": alert["annotations"]},
            },
            "client": "tokentape",
            "client_url": body["externalURL"],
            "links": [{"href": url, "text": name} for name, url in _links(alert["annotations"])],
        }
    return event


def flagger(name: str, transition: Transition) -> dict[str, Any]:
    """A Flagger-style event of a rollout's transition."""
    phase = _PHASES.get(transition.event, "Progressing")
    return {
        "name": name,
        "namespace": "tokentape",
        "phase": phase,
        "metadata": {
            "eventMessage": transition.reason,
            "eventType": "Warning" if phase in ("Failed", "Waiting") else "Normal",
            "event": transition.event,
            "verdict": transition.verdict,
            "weight": f"{transition.weight:g}",
            "canaryUnits": str(transition.canary_units),
            "stableUnits": str(transition.stable_units),
            "timestamp": str(round(transition.ts * 1000)),
        },
    }


def rfc3339(ts: float) -> str:
    """Unix seconds as RFC 3339 in UTC."""
    return datetime.fromtimestamp(ts, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _links(annotations: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(name, url) for name, url in annotations.items() if url.startswith(("http://", "https://"))]


def _common(dicts: Sequence[Mapping[str, str]]) -> dict[str, str]:
    first, *others = dicts
    return {k: v for k, v in first.items() if all(other.get(k) == v for other in others)}


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")

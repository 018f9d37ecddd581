"""Rules, liveness and the life of alerts: pure functions of samples, findings and a time."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge

import alerts as alerts_package
from alerts import messages
from alerts.config import AlertsConfig, MissingSecret, RuleConfig, read_secrets
from alerts.explain import Links, canary_finding
from alerts.lifecycle import Alerts, parse_silence
from alerts.liveness import Liveness
from alerts.losses import METRICS
from alerts.monitor import OWN_METRICS
from alerts.plan import FieldError, parse_plan
from alerts.rollout import Limits, Rollout
from alerts.rules import BUILT_IN, DRIFT_EVIDENCE, Finding, Rule, built_in_rules
from alerts.series import Key, Window, pick, read_registry
from gateway.metrics import Metrics

WAITING = "tokentape:num_requests_waiting"


def series(**values: float) -> dict[Key, float]:
    return {(f"tokentape:{name}", ()): value for name, value in values.items()}


def rule(**keys: Any) -> Rule:
    return Rule(msgspec.convert({"name": "R", **keys}, RuleConfig))


# --- config ---


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"rules": [{"name": "a", "kind": "threshold", "metric": "m"}]}, "value"),
        ({"rules": [{"name": "a", "kind": "burn", "metric": "m", "total": "n"}]}, "objective"),
        ({"rules": [{"name": "a", "kind": "absence"}]}, "metric"),
        ({"rules": [{"name": "a", "kind": "guess"}]}, "kind"),
        ({"rules": [{"name": "a", "kind": "drift", "typo": 1}]}, "typo"),
        ({"rules": [{"name": "a", "kind": "drift"}, {"name": "a", "kind": "drift"}]}, "twice"),
        ({"receivers": [{"name": "w", "kind": "webhook"}]}, "url"),
        ({"receivers": [{"name": "w", "kind": "webhook", "url": "file:///etc/passwd"}]}, "url"),
        ({"receivers": [{"name": "w", "kind": "webhook", "url": "https://u:p@h/"}]}, "url"),
        ({"receivers": [{"name": "p", "kind": "pagerduty"}]}, "secret_env"),
        ({"receivers": [{"name": "s", "kind": "slack", "url": "https://h/", "events": True}]}, "events"),
        ({"gate": "nobody"}, "gate"),
        ({"window_s": 0}, "window_s"),
    ],
)
def test_config_errors_name_the_key(table: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(table, AlertsConfig)


def test_secrets_come_from_the_environment_and_are_never_quoted() -> None:
    table = {"receivers": [{"name": "w", "kind": "webhook", "url": "https://h/", "secret_env": "W"}]}
    config = msgspec.convert(table, AlertsConfig)
    assert read_secrets(config, {"W": "whsec_c2VjcmV0"}) == {"w": "whsec_c2VjcmV0"}
    with pytest.raises(MissingSecret, match=r"alerts\.receivers\[0\]\.secret_env"):
        read_secrets(config, {})
    with pytest.raises(MissingSecret) as caught:
        read_secrets(config, {"W": "whsec_+++not base64"})
    assert "not base64" not in str(caught.value)


def test_every_key_says_what_it_is() -> None:
    for struct in (AlertsConfig, RuleConfig):
        schema = msgspec.json.schema(struct)["$defs"][struct.__name__]["properties"]
        for name, entry in schema.items():
            assert entry.get("description"), f"{struct.__name__}.{name}"


# --- series ---


def test_samples_of_a_registry() -> None:
    registry = CollectorRegistry()
    Counter("tokentape:things", "t", ["kind"], registry=registry).labels("a").inc(3)
    Gauge("tokentape:level", "l", registry=registry).set(0.5)
    samples = read_registry(registry.collect())
    assert pick(samples, "tokentape:things_total", {"kind": "a"}) == [3.0]
    assert pick(samples, "tokentape:things_total", {"kind": "b"}) == []
    assert pick(samples, "tokentape:level", {}) == [0.5]


def test_an_increase_survives_restarts_and_late_births() -> None:
    window = Window(100)
    for now, value in ((0, None), (10, 5.0), (20, 8.0), (30, 2.0), (40, 4.0)):
        window.add(float(now), value)
    # born with 5, then 3 more, then a restart with 2, then 2 more
    assert window.increase(40.0, 100.0) == 12.0
    assert window.increase(40.0, 15.0) == 4.0
    assert Window(10).increase(0.0, 10.0) is None


def test_a_window_remembers_a_bounded_past() -> None:
    window = Window(10_000)
    for i in range(20_000):
        window.add(i / 2, float(i))
    assert len(window._times) <= 2 * 4096 * 4 // 3 + 2
    assert window.increase(9999.5, 1000.0) == pytest.approx(2000, abs=10)


# --- rules ---


@pytest.mark.parametrize(
    ("function", "expected"),
    [("last", 4), ("mean", 2.5), ("min", 1), ("max", 4), ("increase", 3), ("rate", 0.075)],
)
def test_threshold_functions(function: str, expected: float) -> None:
    keys = {"kind": "threshold", "metric": WAITING, "function": function, "window_s": 40, "op": ">="}
    at, above = rule(**keys, value=expected), rule(**keys, value=expected + 0.001)
    for now, value in ((10, 1), (20, 2), (30, 3), (40, 4)):
        samples = series(num_requests_waiting=value)
        found, missed = at.look(samples, now), above.look(samples, now)
    assert found is not None
    assert WAITING in found.description
    assert missed is None


def test_threshold_without_data_is_no_finding() -> None:
    assert rule(kind="threshold", metric=WAITING, op="<", value=5).look({}, 1.0) is None


def test_absence_of_a_gauge_and_of_a_counters_growth() -> None:
    gone = rule(kind="absence", metric=WAITING, window_s=30)
    assert [gone.look({}, now) is not None for now in (0, 10, 20, 30)] == [False, False, False, True]
    assert gone.look(series(num_requests_waiting=0), 40) is None
    still = rule(kind="absence", metric="tokentape:prompt_tokens_total", window_s=30)
    seen = [
        still.look(series(prompt_tokens_total=v), t) is not None
        for t, v in ((0, 5), (20, 6), (40, 6), (60, 6))
    ]
    assert seen == [False, False, False, True]


def burn_after(errors_per_s: list[float]) -> list[bool]:
    burn = rule(
        kind="burn", metric="tokentape:request_success_total", labels={"finished_reason": "error"},
        total="tokentape:request_success_total", objective=0.99, factor=10,
        fast_window_s=60, slow_window_s=600,
    )  # fmt: skip
    bad = total = 0.0
    fired = []
    for second, errors in enumerate(errors_per_s):
        bad, total = bad + errors, total + 10
        samples = {
            ("tokentape:request_success_total", (("finished_reason", "error"),)): bad,
            ("tokentape:request_success_total", (("finished_reason", "stop"),)): total - bad,
        }
        fired.append(burn.look(samples, float(second)) is not None)
    return fired


def test_burn_needs_both_windows() -> None:
    # 20 % errors burn a 1 % budget 20 times too fast.
    fired = burn_after([0.0] * 700 + [2.0] * 600 + [0.0] * 100)
    first = fired.index(True)
    # slow window: 10 % of 600 s of traffic are bad after 300 s; fast window clears within 60 s of the end
    assert first == pytest.approx(700 + 300, abs=3)
    assert fired[1299]
    assert not any(fired[1335:])
    assert not any(burn_after([0.05] * 800))


def test_drift_rule_reads_the_evidence() -> None:
    look = rule(kind="drift", labels={"metric": "errors"}).look
    samples = {(DRIFT_EVIDENCE, (("metric", "errors"),)): 999.0, (DRIFT_EVIDENCE, (("metric", "ttft"),)): 1e6}
    assert look(samples, 0.0) is None
    assert look({**samples, (DRIFT_EVIDENCE, (("metric", "errors"),)): 1000.0}, 1.0) is not None


def test_built_in_rules() -> None:
    dropping, saturated, unavailable, degraded = built_in_rules(queue_limit=100)
    assert dropping.config.name in BUILT_IN
    assert saturated.config.name in BUILT_IN
    drops: Key = ("tokentape:tape_dropped_total", (("cause", "queue_full"),))
    assert dropping.look({}, 0.0) is None
    assert dropping.look({drops: 7.0}, 1.0) is not None
    assert dropping.look({drops: 7.0}, 100.0) is None
    assert saturated.look(series(num_requests_waiting=89), 0.0) is None
    assert saturated.look(series(num_requests_waiting=95), 5.0) is None
    found = saturated.look(series(num_requests_waiting=90), 36.0)
    assert found is not None
    assert found.for_s == 30
    # A gateway whose large model is its own has no such series.
    assert unavailable.look({}, 0.0) is None
    assert unavailable.look(series(large_available=1), 1.0) is None
    assert unavailable.look(series(large_available=0), 12.0) is not None
    assert degraded.look(series(requests_degraded_total=0), 0.0) is None
    assert degraded.look(series(requests_degraded_total=1), 1.0) is not None
    assert {unavailable.config.name, degraded.config.name} <= set(BUILT_IN)


# --- liveness ---


def test_routing_that_follows_its_score_is_live() -> None:
    live, rng = Liveness(), random.Random(1)
    for _ in range(2000):
        margin = rng.uniform(-0.5, 0.5)
        live.decisions([(margin >= 0, margin)])
        live.share(rng.gauss(0.6, 0.1))
    assert live.trouble is None


def test_a_random_router_is_found() -> None:
    live, rng = Liveness(), random.Random(2)
    live.decisions([(rng.random() < 0.5, rng.uniform(-0.5, 0.5)) for _ in range(300)])
    assert live.trouble is not None
    assert "score" in live.trouble


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_share_outside_its_band_is_found(share: float) -> None:
    live, rng = Liveness(), random.Random(3)
    for _ in range(300):
        live.share(rng.gauss(0.6, 0.1))
    assert live.trouble is None
    for _ in range(50):
        live.share(share)
    assert live.trouble is not None
    assert "usual is 59%" in live.trouble


# --- alerts ---


def finding(name: str = "A", for_s: float = 0.0, **keys: Any) -> Finding:
    return Finding(name, f"{name} happens", "numbers", for_s=for_s, **keys)


def sent(alerts: Alerts, findings: list[Finding], now: float) -> list[tuple[str, str]]:
    return [(n.group, n.status) for n in alerts.update(findings, now)[1]]


def test_pending_firing_repeat_resolved() -> None:
    alerts = Alerts(repeat_s=100)
    held = [finding(for_s=10)]
    assert sent(alerts, held, 0) == []
    assert alerts.view(0)[0]["state"] == "pending"
    assert sent(alerts, held, 9) == []
    assert sent(alerts, held, 10) == [("A", "firing")]
    assert sent(alerts, held, 60) == []
    assert sent(alerts, held, 110) == [("A", "firing")]
    assert sent(alerts, [], 120) == [("A", "resolved")]
    assert sent(alerts, [], 130) == []
    assert alerts.view(130)[0]["state"] == "resolved"


def test_a_condition_that_did_not_last_is_never_told() -> None:
    alerts = Alerts()
    assert sent(alerts, [finding(for_s=10)], 0) == []
    assert sent(alerts, [], 5) == []
    assert sent(alerts, [finding(for_s=10)], 12) == []
    assert alerts.view(12)[0]["since"] == 12


def test_groups_tell_one_name_together() -> None:
    alerts = Alerts()
    two = [finding(labels={"metric": "a"}), finding(labels={"metric": "b"})]
    (notification,) = alerts.update(two, 0)[1]
    assert [a.labels["metric"] for a in notification.alerts] in (["a", "b"], ["b", "a"])
    (partly,) = alerts.update(two[:1], 1)[1]
    assert partly.status == "firing"
    assert sorted(a.state for a in partly.alerts) == ["firing", "resolved"]


def test_silences_hold_notifications_back_until_they_end() -> None:
    alerts = Alerts()
    silence = alerts.silence({"matchers": {"alertname": "A"}, "author": "ana", "duration_s": 50}, 0)
    assert sent(alerts, [finding(), finding("B")], 1) == [("B", "firing")]
    assert alerts.view(1)[0]["silenced_by"] == [silence.id] or alerts.view(1)[1]["silenced_by"] == [
        silence.id
    ]
    assert sent(alerts, [finding(), finding("B")], 51) == [("A", "firing")]
    again = alerts.silence({"matchers": {"severity": "warning"}, "author": "ana", "ends_at": 200}, 52)
    assert sent(alerts, [], 60) == [("A", "resolved"), ("B", "resolved")]
    assert alerts.unsilence(again.id) is not None
    assert alerts.unsilence(again.id) is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (3, "body"),
        ({"author": "a", "duration_s": 1}, "matchers"),
        ({"matchers": {}, "author": "a", "duration_s": 1}, "matchers"),
        ({"matchers": {"a": 1}, "author": "a", "duration_s": 1}, "matchers"),
        ({"matchers": {"a": "b"}, "duration_s": 1}, "author"),
        ({"matchers": {"a": "b"}, "author": "a"}, "duration_s"),
        ({"matchers": {"a": "b"}, "author": "a", "duration_s": -1}, "duration_s"),
        ({"matchers": {"a": "b"}, "author": "a", "ends_at": 5}, "ends_at"),
        ({"matchers": {"a": "b"}, "author": "a", "ends_at": True}, "ends_at"),
        ({"matchers": {"a": "b"}, "author": "a", "duration_s": 1, "who": "x"}, "who"),
    ],
)
def test_silence_errors_name_the_field(body: Any, param: str) -> None:
    with pytest.raises(FieldError) as caught:
        parse_silence(body, now=10.0)
    assert caught.value.param == param


def test_inhibition() -> None:
    alerts = Alerts()
    quiet = finding("QualityDrift", inhibited_by=("CanaryRolledBack",))
    assert sent(alerts, [finding("CanaryRolledBack"), quiet], 0) == [("CanaryRolledBack", "firing")]
    assert [a["inhibited_by"] for a in alerts.view(0) if a["name"] == "QualityDrift"] == [
        ["CanaryRolledBack"]
    ]
    assert ("QualityDrift", "firing") in sent(alerts, [quiet], 1) + sent(alerts, [quiet], 2)


def test_alerts_survive_a_restart_without_telling_twice() -> None:
    alerts = Alerts()
    alerts.update([finding()], 0)
    alerts.silence({"matchers": {"a": "b"}, "author": "x", "duration_s": 9}, 0)
    after = Alerts()
    after.load(json.loads(json.dumps(alerts.to_dict())))
    assert sent(after, [finding()], 1) == []
    assert len(after.silences) == 1
    assert sent(after, [], 2) == [("A", "resolved")]


# --- what is said ---


def rolled_back() -> Rollout:
    plan = parse_plan({"name": "cheap", "canary": {"threshold": 0}, "steps": [0.5]}, "s")
    rollout = Rollout(plan, [m.name for m in METRICS], 0.0, Limits())
    good = {m.name: 0.0 for m in METRICS} | {
        "agreement": 0.98,
        "length": 9.0,
        "ttft": 0.1,
        "tokens_per_s": 9.0,
    }
    for i in range(400):
        arm = rollout.arm(str(i))
        rollout.admit(str(i), arm, None, float(i), audited=True)
        rollout.observe(str(i), {**good, "agreement": 0.7} if arm == "canary" else good, float(i))
        rollout.tick(float(i))
    return rollout


LINKS = Links("http://gw", "http://ui/?trace={id}", "http://ui/advisor")


def test_a_rollback_is_told_with_numbers_and_links() -> None:
    rollout = rolled_back()
    end = rollout.history[-1].ts
    found = canary_finding(rollout, ["w1", "w2", "w3"], LINKS, end)
    assert found is not None
    assert found.name == "CanaryRolledBack"
    assert "cheap was rolled back after" in found.summary
    assert "agreement with the large model: canary 0.7, stable 0.98" in found.description
    assert "limit 20" in found.description
    assert [found.annotations[f"trace_{i}"] for i in (1, 2, 3)] == [
        f"http://ui/?trace=w{i}" for i in (1, 2, 3)
    ]
    assert found.annotations["advisor"] == "http://ui/advisor"
    assert canary_finding(rollout, [], LINKS, end + 3601) is None


def test_bodies() -> None:
    rollout = rolled_back()
    found = canary_finding(rollout, ["w1"], LINKS, rollout.history[-1].ts)
    assert found is not None
    alerts = Alerts()
    (notification,) = alerts.update([found], 1000.0)[1]
    body = messages.alertmanager(notification, "http://gw")
    assert json.loads(json.dumps(body)) == body
    assert (body["version"], body["status"], body["truncatedAlerts"]) == ("4", "firing", 0)
    assert {"groupKey", "receiver", "groupLabels", "commonLabels", "commonAnnotations", "externalURL"} <= set(
        body
    )
    (alert,) = body["alerts"]
    assert set(alert) == {
        "status",
        "labels",
        "annotations",
        "startsAt",
        "endsAt",
        "generatorURL",
        "fingerprint",
    }
    assert alert["startsAt"] == "1970-01-01T00:16:40.000Z"
    assert alert["endsAt"] == "0001-01-01T00:00:00Z"
    assert body["commonLabels"]["alertname"] == "CanaryRolledBack"

    slack = messages.slack(body)
    assert "<http://ui/?trace=w1|trace_1>" in slack["attachments"][0]["text"]

    event = messages.pagerduty(body, "key")
    assert (event["routing_key"], event["event_action"]) == ("key", "trigger")
    assert event["payload"]["severity"] == "critical"
    assert {"summary", "source", "severity"} <= set(event["payload"])
    assert {"href": "http://ui/?trace=w1", "text": "trace_1"} in event["links"]
    (over,) = alerts.update([], 2000.0)[1]
    resolved = messages.pagerduty(messages.alertmanager(over, "http://gw"), "key")
    assert resolved["event_action"] == "resolve"
    assert resolved["dedup_key"] == event["dedup_key"]

    flagger = messages.flagger("cheap", rollout.history[-1])
    assert (flagger["name"], flagger["phase"]) == ("cheap", "Failed")
    assert flagger["metadata"]["eventType"] == "Warning"


def test_markup_in_names_stays_text() -> None:
    alerts = Alerts()
    (notification,) = alerts.update([Finding("A", "<!channel> & co", "x")], 0.0)[1]
    text = messages.slack(messages.alertmanager(notification, "http://gw"))["attachments"][0]["text"]
    assert "<!channel>" not in text
    assert "&lt;!channel&gt; &amp; co" in text


def test_evidence_in_words_is_finite_json() -> None:
    assert all(math.isfinite(v["against"]) for v in rolled_back().summary()["evidence"].values())


# --- dashboards ---

ALERTS = Path(alerts_package.__file__).parent


def served_names() -> set[str]:
    """Every name that `/metrics` serves."""
    metrics = Metrics()
    metrics.watch_engine(lambda: 0, lambda: 0, lambda: 0)
    metrics.watch_tape(lambda: 0, lambda: {"queue_full": 1})
    text = metrics.exposition().decode()
    families = {name: kind for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)}
    names = {f"{name}_bucket" if kind == "histogram" else name for name, kind in families.items()}
    return names | OWN_METRICS


def test_dashboard_and_examples_use_served_names_and_leave_none_of_ours_out() -> None:
    dashboard = json.loads((ALERTS / "grafana.json").read_text())
    exprs = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    used = set(re.findall(r"tokentape:\w+", exprs))
    assert used <= served_names()
    ours = {
        "routing_decisions_total", "routing_score_bucket", "audit_agreement_ratio", "guard_hits_total",
        "tape_queue_depth", "tape_dropped_total", "tape_flush_seconds_bucket", "canary_weight",
        "drift_evidence", "alert_deliveries_total",
    }  # fmt: skip
    assert {f"tokentape:{name}" for name in ours} <= used
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_alertmanager_example() -> None:
    rules, alertmanager = yaml.safe_load_all((ALERTS / "alertmanager-example.yml").read_text())
    listed = rules["groups"][0]["rules"]
    assert {r["alert"] for r in listed} <= set(BUILT_IN)
    used = set(re.findall(r"tokentape:\w+", " ".join(r["expr"] for r in listed)))
    assert used <= served_names()
    names = {receiver["name"] for receiver in alertmanager["receivers"]}
    routes = [alertmanager["route"], *alertmanager["route"]["routes"]]
    assert {route["receiver"] for route in routes} == names

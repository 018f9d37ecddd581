"""Watches the gateway from beside it: one thread that thinks.

It folds finished answers into evidence, judges the rollout and the rules, and hands notifications to the
outbox. Order makes restarts safe: decide, save the state with what is to be sent, then fill the outbox
under ids that make doing it twice harmless.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from queue import Empty
from typing import Any, Protocol

import structlog

from alerts.canaries import Canaries
from alerts.config import AlertsConfig
from alerts.drift import Drift
from alerts.evidence import DRIFT_LIMIT
from alerts.explain import Links, canary_finding, drift_finding
from alerts.intake import Intake
from alerts.lifecycle import Alert, Alerts, Notification
from alerts.peers import Peers
from alerts.rollout import Rollout, Transition
from alerts.rules import CONTROL_SILENT, DRIFT_EVIDENCE, ROUTING_NOT_LIVE, Finding, Rule, built_in_rules
from alerts.series import Key, Samples
from alerts.state import StateDamaged, StateFile
from alerts.store import Store
from alerts.webhook import Webhooks
from gateway.policy import Policy

CANARY_WEIGHT = "tokentape:canary_weight"
DELIVERIES = "tokentape:alert_deliveries_total"
OWN_METRICS = frozenset({CANARY_WEIGHT, DRIFT_EVIDENCE, DELIVERIES})
"""Metrics that Monitor.samples adds to the served ones."""

_SAVE_S = 1.0

log = structlog.get_logger("alerts.monitor")


class Watched(Protocol):
    """A control as its follower sees it."""

    @property
    def url(self) -> str: ...
    @property
    def silent(self) -> bool: ...


class Monitor:
    """Thinks about what `intake` gathers, on a thread of its own. `lock` guards all of it."""

    def __init__(
        self,
        *,
        config: AlertsConfig,
        store: Store,
        webhooks: Webhooks,
        state: StateFile,
        canaries: Canaries,
        links: Links,
        samples: Callable[[], Samples],
        queue_limit: int,
        on_promote: Callable[[Policy], None],
        peers: Peers | None = None,
        control: Watched | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """samples: the served metrics now. on_promote: keeps a promoted policy; called before anything else
        remembers the promotion. peers: the other gateways' evidence, where this one rules. control: whom this
        one follows; drift is watched there, over all gateways.
        """
        self.config = config
        self.canaries = canaries
        self.links = links
        self.lock = threading.RLock()
        self.intake = Intake(canaries, clock)
        self.alerts = Alerts(config.repeat_s)
        self._store = store
        self._webhooks = webhooks
        self._state = state
        self._samples = samples
        self._on_promote = on_promote
        self._peers = peers
        self._control = control
        self._clock = clock
        self._rules = [*built_in_rules(queue_limit), *(Rule(rule) for rule in config.rules)]
        self._unsent: list[Notification] = []
        self._unwritten: list[tuple[float, Alert]] = []
        self._dirty = False
        self._next_save = 0.0
        self._thread = threading.Thread(target=self._run, name="alerts", daemon=True)
        self._published: dict[Key, float] = {}
        self._load()
        self._publish()

    # --- judging, on the thread ---

    def judge(self) -> None:
        """Look at everything once: rollout, rules, alerts; save, and hand over what must be sent."""
        with self.lock:
            now = self._clock()
            if self._peers is not None and self._peers.fold(self.intake):
                self._dirty = True
            transitions = self.canaries.act(lambda rollout: rollout.tick(now))
            self.settle(transitions, now)
            waiting = self.canaries.current if self._gate_waits() else None
        if waiting is not None:
            self._ask_gate(waiting)

    def settle(self, transitions: list[Transition], now: float) -> None:
        """After a change of the rollout: alerts follow, then the state, then the outbox. Needs `lock`."""
        if any(transition.event == "promoted" for transition in transitions):
            self._on_promote(self.canaries.stable)
        changed, notifications = self.alerts.update(self._findings(now), now)
        self._unsent += notifications
        # Copies: an alert may change again before the tape takes this.
        self._unwritten += [(now, Alert(**asdict(alert))) for alert in changed]
        if transitions or changed or notifications:
            self.save()
            self._hand_over()
        elif self._unsent or self._unwritten:
            # The tape refused the last time.
            self._hand_over()
        elif self._dirty and now >= self._next_save:
            self.save()

    def _gate_waits(self) -> bool:
        rollout = self.canaries.current
        return rollout is not None and rollout.active and rollout.waits_for_gate

    def _ask_gate(self, rollout: Rollout) -> None:
        # Outside the lock: the gate may take its time, and people must be able to abort meanwhile.
        approved, why = self._webhooks.ask_gate(rollout.plan.name, rollout.summary())
        with self.lock:
            now = self._clock()
            if self.canaries.current is rollout:
                self.settle(self.canaries.act(lambda r: r.pass_gate(approved, now, why)), now)

    def _findings(self, now: float) -> list[Finding]:
        self._publish()
        samples = {**self._samples(), **self.samples()}
        found = [rule.look(samples, now) for rule in self._rules]
        rollout = self.canaries.current
        if rollout is not None:
            found.append(canary_finding(rollout, self.canaries.worst_traces, self.links, now))
        if self._control is None:
            found += [
                drift_finding(name, evidence, self.links)
                for name, evidence in self.intake.drift.evidence.items()
                if evidence >= DRIFT_LIMIT
            ]
        elif self._control.silent:
            found.append(
                Finding(
                    name=CONTROL_SILENT,
                    summary="This gateway hears nothing of its control: every request is on stable.",
                    description=f"No answer from {self._control.url}.",
                )
            )
        if self.intake.liveness.trouble is not None:
            found.append(
                Finding(
                    name=ROUTING_NOT_LIVE,
                    summary="Routing does not follow its policy.",
                    description=self.intake.liveness.trouble,
                    severity="critical",
                )
            )
        return [finding for finding in found if finding is not None]

    def _hand_over(self) -> None:
        rollout = self.canaries.current
        if rollout is not None:
            self._store.put_transitions(rollout)
            for number, transition in enumerate(rollout.history):
                self._webhooks.announce(rollout.plan.name, rollout.plan.salt, number, transition)
        self._store.put_alerts(self._unwritten)
        self._unwritten = []
        for notification in self._unsent:
            self._webhooks.notify(notification, self.links.base_url)
        self._unsent = []
        self._dirty = True

    def samples(self) -> dict[Key, float]:
        """Own metrics as series: canary_weight, drift_evidence{metric}, alert_deliveries_total{outcome}.

        As of the last look, so that a scrape never waits; any thread.
        """
        own = dict(self._published)
        for outcome in ("delivered", "retried", "failed", "disabled"):
            own[DELIVERIES, (("outcome", outcome),)] = self._webhooks.outcomes[outcome]
        return own

    def _publish(self) -> None:
        rollout = self.canaries.current
        active = rollout is not None and rollout.active
        published: dict[Key, float] = {(CANARY_WEIGHT, ()): rollout.weight if rollout and active else 0.0}
        evidence = rollout.evidence.drifts if rollout and active else self.intake.drift.evidence
        published |= {(DRIFT_EVIDENCE, (("metric", name),)): value for name, value in evidence.items()}
        self._published = published

    # --- state ---

    def save(self) -> None:
        """Write the state down. Needs `lock`."""
        began = time.perf_counter()
        self._state.save(
            {
                "canaries": self.canaries.to_dict(),
                "alerts": self.alerts.to_dict(),
                "drift": self.intake.drift.to_dict(),
                "folded": None if self._peers is None else self._peers.to_list(),
                "unsent": [asdict(notification) for notification in self._unsent],
                "unwritten": [(ts, asdict(alert)) for ts, alert in self._unwritten],
            }
        )
        took = time.perf_counter() - began
        self._dirty = False
        # A large state is saved less often, so that saving stays a few per cent of the time.
        self._next_save = self._clock() + max(_SAVE_S, 20 * took)

    def _load(self) -> None:
        try:
            state = self._state.load()
        except StateDamaged as error:
            log.error("alerts_state_damaged", error=str(error))
            return
        if state is None:
            return
        try:
            self._take(state)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            log.error("alerts_state_damaged", error=str(self._state.set_aside(repr(error))))

    def _take(self, state: Mapping[str, Any]) -> None:
        drift = Drift.from_dict(state["drift"])
        unsent = [
            Notification(**{**entry, "alerts": [Alert(**alert) for alert in entry["alerts"]]})
            for entry in state["unsent"]
        ]
        self.alerts.load(state["alerts"])
        self.canaries.load(state["canaries"])
        if self._peers is not None:
            self._peers.load(state.get("folded"))
        if drift.policy_hash == self.canaries.stable.hash:
            self.intake.drift = drift
        self._unsent = unsent
        self._unwritten = [(ts, Alert(**alert)) for ts, alert in state.get("unwritten", ())]
        # Written or not before the end: the ids make it harmless to hand over again. Where the tape refuses,
        # the next look tries again.
        self._guarded(self._hand_over)

    # --- the thread ---

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def stop(self) -> None:
        """Fold what was handed over, save, end."""
        self.intake.queue.put(None)
        self._thread.join()

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until everything handed over before is folded and judged; False on time-out."""
        done = threading.Event()

        def reached() -> None:
            try:
                self.judge()
            finally:
                done.set()

        self.intake.queue.put(reached)
        return done.wait(timeout_s)

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            try:
                event = self.intake.queue.get(timeout=max(0.0, due - time.monotonic()))
            except Empty:
                self._guarded(self.judge)
                due = time.monotonic() + self.config.interval_s
                continue
            if event is None:
                with self.lock:
                    self._guarded(self.save)
                return
            self._dirty = True
            with self.lock:
                self._guarded(event)
            if time.monotonic() >= due:
                self._guarded(self.judge)
                due = time.monotonic() + self.config.interval_s

    def _guarded(self, what: Callable[[], None]) -> None:
        try:
            what()
        except Exception:
            # Whatever breaks here, decoding and the next look go on.
            log.exception("alerts_failed")

"""Watches the gateway from beside it: an observer that never blocks, and one thread that thinks.

The thread folds finished answers into evidence, judges the rollout and the rules, and hands notifications to
the outbox. Order makes restarts safe: decide, save the state with what is to be sent, then fill the outbox
under ids that make doing it twice harmless.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from queue import Empty, SimpleQueue
from typing import Any

import structlog

from alerts.answers import Answer, Answers
from alerts.canaries import Canaries, counts
from alerts.config import AlertsConfig
from alerts.drift import Drift
from alerts.evidence import DRIFT_LIMIT
from alerts.explain import Links, canary_finding, drift_finding
from alerts.lifecycle import Alert, Alerts, Notification
from alerts.liveness import Liveness
from alerts.rollout import Rollout, Transition
from alerts.rules import DRIFT_EVIDENCE, ROUTING_NOT_LIVE, Finding, Rule, built_in_rules
from alerts.series import Key, Samples
from alerts.state import StateDamaged, StateFile
from alerts.store import Store
from alerts.webhook import Webhooks
from gateway.core import Mode, Step, Tick
from gateway.policy import Policy
from gateway.request import Trace

MOST_QUEUED_ROWS = 200_000
CANARY_WEIGHT = "tokentape:canary_weight"
DELIVERIES = "tokentape:alert_deliveries_total"
OWN_METRICS = frozenset({CANARY_WEIGHT, DRIFT_EVIDENCE, DELIVERIES})
"""Metrics that Monitor.samples adds to the served ones."""

_SAVE_S = 1.0
_MOST_KEYS = 100_000
_RECENT = 500

log = structlog.get_logger("alerts.monitor")


class Monitor:
    """An observer of the engine with a thread of its own. `lock` guards everything it thinks about."""

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
        clock: Callable[[], float] = time.time,
    ) -> None:
        """samples: the served metrics now. on_promote: keeps a promoted policy; called before anything else
        remembers the promotion."""
        self.config = config
        self.canaries = canaries
        self.links = links
        self.lock = threading.RLock()
        self.alerts = Alerts(config.repeat_s)
        self.drift = Drift(canaries.stable.hash)
        self.recent_agreement: deque[float] = deque(maxlen=_RECENT)
        self.dropped_rows = 0
        self._store = store
        self._webhooks = webhooks
        self._state = state
        self._samples = samples
        self._on_promote = on_promote
        self._clock = clock
        self._rules = [*built_in_rules(queue_limit), *(Rule(rule) for rule in config.rules)]
        self._watched = canaries.stable
        self._liveness = Liveness()
        self._answers = Answers()
        self._keys: dict[str, str | None] = {}
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._depth = 0
        self._depth_lock = threading.Lock()
        self._unsent: list[Notification] = []
        self._changed: list[Alert] = []
        self._dirty = False
        self._next_save = 0.0
        self._thread = threading.Thread(target=self._run, name="alerts", daemon=True)
        self._published: dict[Key, float] = {}
        self._load()
        self._publish()

    # --- the observer: on the engine's thread, never waits ---

    def on_admit(self, trace: Trace) -> None:
        """A choice was taken in."""
        self._queue.put(lambda: self._admit(trace))

    def on_tick(self, tick: Tick) -> None:
        """Rows of one turn of the engine; beyond the bound they are lost, their answers count as worst."""
        rows = (*tick.steps, *tick.restated)
        if not rows:
            return
        with self._depth_lock:
            fits = self._depth + len(rows) <= MOST_QUEUED_ROWS
            self._depth += len(rows) if fits else 0
        if not fits:
            self.dropped_rows += len(rows)
            lost = {(step.request_id, step.choice) for step in rows}
            self._queue.put(lambda: self._lose(lost))
            return
        self._queue.put(lambda: self._steps(rows))

    def on_finish(self, trace: Trace) -> None:
        """A choice is complete, its audit included."""
        self._queue.put(lambda: self._finish(trace))

    def remember_key(self, request_id: str, key: str | None) -> None:
        """The sticky key of a request about to be submitted, None where it is its own; any thread."""
        if len(self._keys) >= _MOST_KEYS:
            # Requests that were assigned an arm and never came; the oldest go.
            for old in list(self._keys)[: _MOST_KEYS // 2]:
                self._keys.pop(old, None)
        self._keys[request_id] = key

    def score(self, request_id: str, name: str, value: float) -> None:
        """A task score in [0, 1]; any thread."""
        self._queue.put(lambda: self.canaries.score(request_id, name, value))

    # --- folding, on the thread ---

    def _admit(self, trace: Trace) -> None:
        request = trace.request
        self._answers.admit(request)
        if request.choice == 0:
            self.canaries.admit(request, self._keys.pop(request.id, None), self._clock())

    def _steps(self, rows: tuple[Step, ...]) -> None:
        with self._depth_lock:
            self._depth -= len(rows)
        for step in rows:
            self._answers.step(step)

    def _lose(self, lost: set[tuple[str, int]]) -> None:
        for request_id, choice in lost:
            self._answers.lose(request_id, choice)

    def _finish(self, trace: Trace) -> None:
        answer = self._answers.finish(trace)
        if answer is None or not counts(trace.request):
            return
        self.canaries.observe(answer, self._clock())
        if answer.arm == "stable":
            self._learn_stable(answer, trace)

    def _learn_stable(self, answer: Answer, trace: Trace) -> None:
        policy = trace.request.policy
        if policy != self.canaries.stable:
            return
        if policy != self._watched:
            self._watched = policy
            self.drift, self._liveness = Drift(policy.hash), Liveness()
        self.drift.observe(answer.values, answer.judged)
        agreement = answer.values["agreement"]
        if answer.judged and agreement is not None:
            self.recent_agreement.append(agreement)
        if policy.mode is Mode.ROUTED:
            self._liveness.decisions(answer.decisions)
            if answer.small_share is not None:
                self._liveness.share(answer.small_share)

    # --- judging, on the thread ---

    def judge(self) -> None:
        """Look at everything once: rollout, rules, alerts; save, and hand over what must be sent."""
        with self.lock:
            now = self._clock()
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
        self._changed += changed
        if transitions or changed or notifications:
            self.save()
            self._hand_over(now)
        elif self._unsent or self._changed:
            # The tape refused the last time.
            self._hand_over(now)
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
        found += [
            drift_finding(name, evidence, self.links)
            for name, evidence in self.drift.evidence.items()
            if evidence >= DRIFT_LIMIT
        ]
        if self._liveness.trouble is not None:
            found.append(
                Finding(
                    name=ROUTING_NOT_LIVE,
                    summary="Routing does not follow its policy.",
                    description=self._liveness.trouble,
                    severity="critical",
                )
            )
        return [finding for finding in found if finding is not None]

    def _hand_over(self, now: float) -> None:
        rollout = self.canaries.current
        if rollout is not None:
            self._store.put_transitions(rollout)
            for number, transition in enumerate(rollout.history):
                self._webhooks.announce(rollout.plan.name, rollout.plan.salt, number, transition)
        self._store.put_alerts(self._changed, now)
        self._changed = []
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
        evidence = rollout.evidence.drifts if rollout and active else self.drift.evidence
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
                "drift": self.drift.to_dict(),
                "unsent": [asdict(notification) for notification in self._unsent],
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
        if drift.policy_hash == self.canaries.stable.hash:
            self.drift = drift
        self._unsent = unsent
        # Written or not before the end: the ids make it harmless to hand over again.
        self._hand_over(self._clock())

    # --- the thread ---

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def stop(self) -> None:
        """Fold what was handed over, save, end."""
        self._queue.put(None)
        self._thread.join()

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until everything handed over before is folded and judged; False on time-out."""
        done = threading.Event()

        def reached() -> None:
            try:
                self.judge()
            finally:
                done.set()

        self._queue.put(reached)
        return done.wait(timeout_s)

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            try:
                event = self._queue.get(timeout=max(0.0, due - time.monotonic()))
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

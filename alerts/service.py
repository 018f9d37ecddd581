"""What the HTTP API and the engine's caller need of alerts/: one object, checked input, plain values out.

Errors: FieldError (its `param` names the field: 400), WrongState (409), NotFound (404).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import structlog

from alerts.canaries import CONTROL, Assignment, Canaries
from alerts.config import AlertsConfig, read_secrets
from alerts.explain import Links
from alerts.follow import Control, ControlAway, Follower
from alerts.intake import Intake
from alerts.monitor import Monitor
from alerts.orders import Orders
from alerts.peers import Peers
from alerts.plan import FieldError, Plan, estimate, parse_plan
from alerts.rollout import Limits, Rollout, WrongState
from alerts.series import Key, Samples
from alerts.state import StateDamaged, StateFile
from alerts.store import Store
from alerts.webhook import Webhooks
from gateway.core import MIDDLES
from gateway.policy import Policy, settings
from gateway.routing import PolicyConflict, PolicyTable, overlay

__all__ = ["AlertsService", "Assignment", "ControlAway", "FieldError", "Follows", "NotFound", "WrongState"]

PROMOTED_FILE = "promoted_policy.json"
STATE_FILE = "alerts.json"

log = structlog.get_logger("alerts.service")


class NotFound(LookupError):
    """There is no rollout, silence or delivery of that name; the message says which."""


class Follows(WrongState):
    """Rollouts are ruled by another gateway; the message names it (HTTP 409)."""


class AlertsService:
    """Rollouts, alerts, silences and deliveries of one gateway. Methods may be called from any thread."""

    def __init__(
        self,
        *,
        config: AlertsConfig,
        data_dir: Path,
        cursor: Callable[[], duckdb.DuckDBPyConnection],
        policies: Mapping[str, Policy],
        environ: Mapping[str, str],
        base_url: str,
        samples: Callable[[], Samples],
        queue_limit: int,
        trace_url: str | None = None,
        advisor_url: str | None = None,
        name: str | None = None,
        control: Control | None = None,
        num_middles: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """policies: the config's, `stable` among them. cursor: makes one of the open tape.

        samples: the served metrics now. queue_limit: choices that may wait. num_middles: tiers between small
        and large, which a canary may speak of.

        name: this gateway's, in a fleet. control: the one whose rollouts it follows; None: it rules its own.

        trace_url (with `{id}`), advisor_url: pages of the UI; without them links lead to the API.
        Raises alerts.config.MissingSecret.
        """
        self._policies = dict(policies)
        self._num_middles = num_middles
        self._clock = clock
        self._promoted = StateFile(data_dir / PROMOTED_FILE)
        self.promoted: dict[str, Any] | None = self._load_promoted()
        stable = Policy.of(self.promoted["policy"]) if self.promoted else policies["stable"]
        base_url = (config.base_url or base_url).rstrip("/")
        store = Store(cursor)
        self._store = store
        self.webhooks = Webhooks(store, config, read_secrets(config, environ), clock=clock)
        limits = Limits(config.window_s, config.no_data_s, config.max_units, config.max_step_s)
        canaries = Canaries(stable, limits, gated=config.gate is not None, control=name or CONTROL)
        self.follower = None if control is None else Follower(control, data_dir, canaries.follow, clock)
        self.monitor = Monitor(
            config=config,
            store=store,
            webhooks=self.webhooks,
            state=StateFile(data_dir / STATE_FILE),
            canaries=canaries,
            peers=None if name is None or control is not None else Peers(cursor, data_dir),
            control=self.follower,
            links=Links(
                base_url,
                trace_url or f"{base_url}/v1/traces/{{id}}",
                advisor_url or f"{base_url}/v1/advisor",
            ),
            samples=samples,
            queue_limit=queue_limit,
            on_promote=self._keep_promoted,
            clock=clock,
        )

    def start(self) -> None:
        """Start the threads."""
        if self.follower is not None:
            self.follower.start()
        self.monitor.start()
        self.webhooks.start()

    def stop(self) -> None:
        """Save the state and end the threads; after the engine has stopped, before the tape closes."""
        if self.follower is not None:
            self.follower.stop()
        self.monitor.stop()
        self.webhooks.stop()

    # --- a fleet ---

    @property
    def orders(self) -> Orders:
        """What those that follow this gateway must do; raises Follows where it follows another one itself."""
        self._rules_here()
        return self.monitor.canaries.orders

    def _rules_here(self) -> None:
        if self.follower is not None:
            raise Follows(f"This gateway follows {self.follower.url}: rollouts are ruled there")

    # --- requests ---

    @property
    def observer(self) -> Intake:
        """What the worker must tell of admissions, ticks and ends; never blocks."""
        return self.monitor.intake

    @property
    def stable(self) -> Policy:
        """The policy in force on stable: the config's, or the one promoted last."""
        return self.monitor.canaries.stable

    def assign(self, request_id: str, user: str | None, header_user: str | None) -> Assignment:
        """Arm and policy of a new request; never waits.

        user: the body's `user`; header_user: `x-user-id`. Without either the request is its own key.
        """
        return self.monitor.canaries.assign(request_id, user or header_user)

    def score(self, request_id: str, name: str, value: float) -> None:
        """A task score in [0, 1] of a finished trace."""
        self.monitor.intake.score(request_id, name, value)

    def samples(self) -> dict[Key, float]:
        """Own metrics: tokentape:canary_weight, drift_evidence{metric}, alert_deliveries_total{outcome}."""
        return self.monitor.samples()

    # --- rollouts ---

    def estimate(self, body: object) -> dict[str, Any]:
        """How long the verdict of a rollout with this body would take; starts nothing. Raises FieldError."""
        self._rules_here()
        plan, _ = self._plan(body)
        return self._estimate(plan)

    def start_rollout(self, body: object) -> dict[str, Any]:
        """Start a rollout: its summary with `estimate`. Raises FieldError, WrongState while one is active."""
        self._rules_here()
        plan, canary = self._plan(body)
        told = self._estimate(plan)
        monitor = self.monitor
        with monitor.lock:
            now = self._clock()
            rollout = monitor.canaries.start(plan, canary, now)
            monitor.settle(list(rollout.history), now)
            return {**rollout.summary(), "estimate": told}

    def rollouts(self) -> list[dict[str, Any]]:
        """All rollouts, newest first; those of the control where one is followed (ControlAway)."""
        if self.follower is not None:
            found: list[dict[str, Any]] = self.follower.rollout()["data"]
            return found
        with self.monitor.lock:
            return self.monitor.canaries.list()

    def rollout(self, name: str) -> dict[str, Any]:
        """One rollout; raises NotFound. That of the control where one is followed (ControlAway)."""
        if self.follower is not None:
            there: dict[str, Any] = self.follower.rollout(name)
            return there
        with self.monitor.lock:
            found = self.monitor.canaries.find(name)
        if found is None:
            raise NotFound(f"There is no rollout {name[:200]!r}")
        return found

    def promote(self, name: str) -> dict[str, Any]:
        """Make the canary stable, proven or not; raises NotFound, WrongState."""
        return self._act(name, lambda rollout: rollout.promote(self._clock()))

    def abort(self, name: str) -> dict[str, Any]:
        """Everything back to stable; raises NotFound, WrongState."""
        return self._act(name, lambda rollout: rollout.abort(self._clock()))

    def pause(self, name: str) -> dict[str, Any]:
        """Hold the weight; raises NotFound, WrongState."""
        return self._act(name, lambda rollout: rollout.pause(self._clock()))

    def resume(self, name: str) -> dict[str, Any]:
        """Go on; raises NotFound, WrongState."""
        return self._act(name, lambda rollout: rollout.resume(self._clock()))

    # --- alerts ---

    def alerts(self, limit: int = 200) -> dict[str, Any]:
        """`data`: every alert now; `silences`: those in force; `history`: changes, newest first."""
        now = self._clock()
        with self.monitor.lock:
            alerts = self.monitor.alerts.view(now)
            silences = [asdict(s) for s in self.monitor.alerts.silences.values() if s.ends_at > now]
        return {"data": alerts, "silences": silences, "history": self._store.alert_history(limit)}

    def add_silence(self, body: object) -> dict[str, Any]:
        """Silence alerts: matchers, author, duration_s or ends_at, comment. Raises FieldError."""
        with self.monitor.lock:
            silence = self.monitor.alerts.silence(body, self._clock())
            self.monitor.save()
        return asdict(silence)

    def delete_silence(self, silence_id: str) -> None:
        """End a silence; raises NotFound."""
        with self.monitor.lock:
            if self.monitor.alerts.unsilence(silence_id) is None:
                raise NotFound(f"There is no silence {silence_id[:200]!r}")
            self.monitor.save()

    def deliveries(self, limit: int = 100) -> list[dict[str, Any]]:
        """The latest deliveries, newest first."""
        return [asdict(delivery) for delivery in self._store.deliveries(limit)]

    def redeliver(self, delivery_id: str) -> dict[str, Any]:
        """Send a delivery again with the same webhook-id; raises NotFound."""
        if not self.webhooks.redeliver(delivery_id):
            raise NotFound(f"There is no delivery {delivery_id[:200]!r} to a configured receiver")
        delivery = self._store.delivery(delivery_id)
        assert delivery is not None
        return asdict(delivery)

    # --- inside ---

    def _plan(self, body: object) -> tuple[Plan, Policy]:
        plan = parse_plan(body, secrets.token_hex(8))
        overrides = dict(plan.canary)
        base = self.stable
        named = overrides.pop("policy", None)
        if named is not None:
            if not isinstance(named, str) or named not in self._policies:
                raise FieldError("canary.policy", f"there are: {', '.join(sorted(self._policies))}")
            base = self.stable if named == "stable" else self._policies[named]
        try:
            table = msgspec.convert(overrides, PolicyTable)
            policy = overlay(base, table)
        except PolicyConflict as error:
            raise FieldError(f"canary.{error.key}", str(error).split(": ", 1)[-1]) from None
        except msgspec.ValidationError as error:
            raise _field_error(str(error)) from None
        for tier in MIDDLES[self._num_middles :]:
            if getattr(policy, tier) is not None:
                raise FieldError(f"canary.{tier}", "there is no such tier here")
        return plan, policy

    def _estimate(self, plan: Plan) -> dict[str, Any]:
        with self.monitor.lock:
            recent = list(self.monitor.intake.recent_agreement)
        return estimate(plan, recent)

    def _act(self, name: str, act: Callable[[Rollout], object]) -> dict[str, Any]:
        self._rules_here()
        monitor = self.monitor
        with monitor.lock:
            found = self.rollout(name)
            current = monitor.canaries.current
            if current is None or current.plan.name != name:
                raise WrongState(f"rollout {name!r} has ended: {found['verdict']}")
            monitor.settle(monitor.canaries.act(act), self._clock())
            return self.rollout(name)

    def _keep_promoted(self, policy: Policy) -> None:
        rollout = self.monitor.canaries.current
        assert rollout is not None
        self.promoted = {
            "rollout": rollout.plan.name,
            "promoted": rollout.history[-1].ts,
            "policy_hash": policy.hash,
            "policy": settings(policy),
        }
        self._promoted.save(self.promoted)

    def _load_promoted(self) -> dict[str, Any] | None:
        try:
            state = self._promoted.load()
            if state is not None:
                Policy.of(state["policy"])
        except StateDamaged as error:
            log.error("promoted_policy_damaged", error=str(error))
            return None
        except (KeyError, TypeError, ValueError) as error:
            log.error("promoted_policy_damaged", error=str(self._promoted.set_aside(repr(error))))
            return None
        return state


def _field_error(message: str) -> FieldError:
    """msgspec's "Expected `float` - at `$.threshold`" as an error of the field `canary.threshold`."""
    why, _, where = message.partition(" - at `$.")
    if where:
        return FieldError(f"canary.{where.rstrip('`')}", why)
    if "unknown field `" in why:
        return FieldError(f"canary.{why.split('`')[1]}", "unknown field")
    return FieldError("canary", why)

"""One rollout's life: arms, units, steps and verdicts. Pure: time is an argument, nothing is read or sent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from alerts.evidence import Evidence
from alerts.losses import BY_NAME
from alerts.plan import Plan
from alerts.units import Units


class Verdict(StrEnum):
    """Where a rollout stands (contract: Rollouts and alerts)."""

    PROGRESSING = "progressing"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"
    INCONCLUSIVE = "inconclusive"
    NO_DATA = "no_data"
    ABORTED = "aborted"


ENDED = frozenset({Verdict.PROMOTED, Verdict.ROLLED_BACK, Verdict.ABORTED})
"""Verdicts after which every request is on stable."""


class WrongState(Exception):
    """The rollout cannot do that where it stands; the message says why (HTTP 409)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What holds for every rollout, from [alerts].

    window_s: a key gives one observation in so many seconds. no_data_s: silence of the canary after which
    the verdict is `no_data`. max_units, max_step_s: canary units and time on the last step after which an
    unproven canary is `inconclusive`.
    """

    window_s: float = 3600.0
    no_data_s: float = 600.0
    max_units: int = 2000
    max_step_s: float = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class Transition:
    """One change of a rollout: a row of the tape's `rollouts` table and a line of its history.

    event: started, step, paused, resumed, no_data, data, inconclusive, vetoed, promoted, rolled_back,
    aborted.
    """

    ts: float
    event: str
    verdict: str
    step: int
    weight: float
    paused: bool
    reason: str
    canary_units: int
    stable_units: int
    against: float


def arm_of(salt: str, key: str, weight: float) -> str:
    """`canary` or `stable`, by the contract's hash: a raised weight moves nobody back."""
    digest = hashlib.sha256(f"{salt}:{key}".encode()).digest()
    return "canary" if int.from_bytes(digest, "big") % 10000 < round(weight * 10000) else "stable"


def user_hash_of(salt: str, key: str) -> str:
    """16 hex digits that tell a rollout's users apart on the tape without naming them."""
    return hashlib.blake2b(f"{salt}:{key}".encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


class Rollout:
    """A canary on its way. `tick` judges; everything else records."""

    def __init__(
        self,
        plan: Plan,
        metrics: Iterable[str],
        now: float,
        limits: Limits | None = None,
        baselines: Mapping[str, float] | None = None,
        gated: bool = False,
    ) -> None:
        """metrics: names out of losses.METRICS that both policies can be compared by.

        baselines: stable's references known already; gated: a promotion waits for `pass_gate`.
        """
        self.plan = plan
        self.limits = limits if limits is not None else Limits()
        self.evidence = Evidence(metrics, plan.margin, plan.alpha)
        self.gated = gated
        self.waits_for_gate = False
        self.verdict = Verdict.PROGRESSING
        self.paused = False
        self.step = 0
        self.started = now
        self.step_started = now
        self.step_units = 0
        self.last_data = now
        self.history: list[Transition] = []
        self.units = Units(self.evidence, self.limits.window_s, now, baselines or {})
        self._note(now, "started", f"canary of {', '.join(sorted(plan.canary)) or 'nothing'} starts")

    # --- arms ---

    @property
    def active(self) -> bool:
        """Whether the canary takes traffic."""
        return self.verdict not in ENDED

    @property
    def weight(self) -> float:
        """The canary's share of keys now: 0 once rolled back or aborted, 1 once promoted."""
        if self.verdict is Verdict.PROMOTED:
            return 1.0
        return self.plan.steps[self.step] if self.active else 0.0

    def arm(self, key: str) -> str:
        """The arm of a key; `stable` once the rollout has ended."""
        return arm_of(self.plan.salt, key, self.weight) if self.active else "stable"

    # --- units ---

    def admit(self, unit: str, arm: str, key: str | None, now: float, audited: bool) -> str:
        """A request arrives; `fresh`, `returning` or no unit of evidence (Units.admit)."""
        return self.units.admit(unit, arm, key, now, audited) if self.active else ""

    def observe(self, unit: str, values: Mapping[str, float | None], now: float) -> None:
        """A unit's metrics are known (see Units.observe)."""
        if self.active and self.units.observe(unit, values) == "canary":
            self.step_units += 1
            self.last_data = now

    def score(self, unit: str, arm: str, name: str, value: float) -> None:
        """A task score in [0, 1] for an answer given earlier."""
        if self.active:
            self.evidence.score(unit, arm, name, value)

    # --- verdicts ---

    def tick(self, now: float) -> list[Transition]:
        """Judge what is known; the transitions this caused, oldest first."""
        before = len(self.history)
        if self.active:
            self._judge(now)
        return self.history[before:]

    def _judge(self, now: float) -> None:
        harmful = self.evidence.harmful(self.plan.min_units)
        if harmful:
            return self._end(Verdict.ROLLED_BACK, now, f"canary is worse: {', '.join(harmful)}")
        if self.paused:
            return None
        if now - max(self.last_data, self.step_started) >= self.limits.no_data_s:
            if self.verdict is not Verdict.NO_DATA:
                self.verdict = Verdict.NO_DATA
                self._note(now, "no_data", f"no canary unit for {self.limits.no_data_s:g} s")
            return None
        if self.verdict is Verdict.NO_DATA:
            self.verdict = Verdict.PROGRESSING
            self._note(now, "data", "canary units arrive again")
        waited = now - self.step_started
        if self.step_units < self.plan.min_units or waited < self.plan.min_step_s:
            return self._give_up_late(now, waited)
        if self.step < len(self.plan.steps) - 1:
            # No wider while suspicion stands: half the evidence of a rollback holds the step.
            if self.evidence.against < self.evidence.limit / 2:
                self._start_step(self.step + 1, now)
            return None
        unproven = self.evidence.unproven(self.plan.min_units)
        if not unproven and self.evidence.comparisons:
            if self.gated:
                self.waits_for_gate = True
                return None
            return self._end(Verdict.PROMOTED, now, "not worse by more than the margin, in every metric")
        return self._give_up_late(now, waited)

    def _give_up_late(self, now: float, waited: float) -> None:
        last = self.step == len(self.plan.steps) - 1
        if (last and self.step_units >= self.limits.max_units) or waited >= self.limits.max_step_s:
            open_metrics = ", ".join(self.evidence.unproven(self.plan.min_units)) or "too few units"
            self._hold(Verdict.INCONCLUSIVE, now, f"not proven either way: {open_metrics}")

    def pass_gate(self, approved: bool, now: float, reason: str = "") -> list[Transition]:
        """The gate's answer to a promotion that waits for it; a veto pauses the rollout as inconclusive."""
        before = len(self.history)
        if self.active and self.waits_for_gate:
            self.waits_for_gate = False
            if approved:
                self._end(Verdict.PROMOTED, now, "proven, and the gate agreed")
            else:
                self._hold(Verdict.INCONCLUSIVE, now, f"the gate vetoed the promotion: {reason}", "vetoed")
        return self.history[before:]

    # --- people ---

    def pause(self, now: float, reason: str = "paused by hand") -> Transition:
        """Hold the weight; harm still rolls back. Raises WrongState."""
        self._must_be_active()
        if self.paused:
            raise WrongState(f"rollout {self.plan.name!r} is paused already")
        self.paused = True
        return self._note(now, "paused", reason)

    def resume(self, now: float, reason: str = "resumed by hand") -> Transition:
        """Go on from the same step, with its units and time counted anew. Raises WrongState."""
        self._must_be_active()
        if not self.paused:
            raise WrongState(f"rollout {self.plan.name!r} is not paused")
        self.paused = False
        self.verdict = Verdict.PROGRESSING
        self.step_started, self.step_units, self.last_data = now, 0, now
        return self._note(now, "resumed", reason)

    def abort(self, now: float, reason: str = "aborted by hand") -> Transition:
        """Everything back to stable. Raises WrongState."""
        self._must_be_active()
        self._end(Verdict.ABORTED, now, reason)
        return self.history[-1]

    def promote(self, now: float, reason: str = "promoted by hand") -> Transition:
        """The canary becomes stable, proven or not. Raises WrongState."""
        self._must_be_active()
        self._end(Verdict.PROMOTED, now, reason)
        return self.history[-1]

    def _must_be_active(self) -> None:
        if not self.active:
            raise WrongState(f"rollout {self.plan.name!r} has ended: {self.verdict}")

    def _start_step(self, step: int, now: float) -> None:
        self.step, self.step_started, self.step_units = step, now, 0
        self._note(now, "step", f"step {step + 1} of {len(self.plan.steps)}")

    def _hold(self, verdict: Verdict, now: float, reason: str, event: str | None = None) -> None:
        self.verdict, self.paused = verdict, True
        self._note(now, event or str(verdict), reason)

    def _end(self, verdict: Verdict, now: float, reason: str) -> None:
        self.verdict, self.paused, self.waits_for_gate = verdict, False, False
        self._note(now, str(verdict), reason)

    def _note(self, now: float, event: str, reason: str) -> Transition:
        transition = Transition(
            ts=now,
            event=event,
            verdict=str(self.verdict),
            step=self.step,
            weight=self.weight,
            paused=self.paused,
            reason=reason,
            canary_units=self.evidence.canary_units,
            stable_units=self.evidence.stable_units,
            against=self.evidence.against,
        )
        self.history.append(transition)
        return transition

    # --- the outside ---

    def summary(self) -> dict[str, Any]:
        """The body of `GET /v1/rollouts/{name}`."""
        return {
            "name": self.plan.name,
            "verdict": str(self.verdict),
            "paused": self.paused,
            "weight": self.weight,
            "step": self.step,
            "steps": list(self.plan.steps),
            "units": {"stable": self.evidence.stable_units, "canary": self.evidence.canary_units},
            "evidence": self.evidence.summary(),
            "combined": {
                "against": self.evidence.against,
                "drift": self.evidence.drift,
                "limit": self.evidence.limit,
            },
            "unproven": self.evidence.unproven(self.plan.min_units),
            "salt": self.plan.salt,
            "canary": dict(self.plan.canary),
            "margin": self.plan.margin,
            "alpha": self.plan.alpha,
            "min_units": self.plan.min_units,
            "min_step_s": self.plan.min_step_s,
            "audit_rate": self.plan.audit_rate,
            "started": self.started,
            "history": [asdict(transition) for transition in self.history],
        }

    def to_dict(self) -> dict[str, Any]:
        """The whole state in plain values."""
        return {
            "plan": self.plan.to_dict(),
            "limits": asdict(self.limits),
            "evidence": self.evidence.to_dict(),
            "gated": self.gated,
            "waits_for_gate": self.waits_for_gate,
            "verdict": str(self.verdict),
            "paused": self.paused,
            "step": self.step,
            "started": self.started,
            "step_started": self.step_started,
            "step_units": self.step_units,
            "last_data": self.last_data,
            "history": [asdict(transition) for transition in self.history],
            "units": self.units.to_dict(),
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Rollout:
        """The rollout that `to_dict` wrote down."""
        rollout = cls(Plan.from_dict(state["plan"]), (), state["started"], Limits(**state["limits"]))
        rollout.evidence = Evidence.from_dict(state["evidence"])
        rollout.gated = state["gated"]
        rollout.waits_for_gate = state["waits_for_gate"]
        rollout.verdict = Verdict(state["verdict"])
        rollout.paused = state["paused"]
        rollout.step = state["step"]
        rollout.step_started = state["step_started"]
        rollout.step_units = state["step_units"]
        rollout.last_data = state["last_data"]
        rollout.history = [Transition(**entry) for entry in state["history"]]
        rollout.units = Units.from_dict(state["units"], rollout.evidence)
        return rollout


def comparable_metrics(stable_verified: bool, canary_verified: bool) -> list[str]:
    """The metrics by which two policies can be compared; acceptance needs drafts verified in both."""
    both = stable_verified and canary_verified
    return [name for name in BY_NAME if name != "acceptance" or both]

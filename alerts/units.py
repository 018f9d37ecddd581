"""From requests to units of evidence: one observation per key and window, measured against baselines."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from statistics import median
from typing import Any

from alerts.evidence import Evidence
from alerts.losses import to_loss

NUM_BASELINE = 20
"""Stable observations whose median becomes the reference of latency, speed and length."""

_MOST_KEYS = 200_000
_WAITS = -1


class Units:
    """Who counts, once and when. A key's later windows only tell how its own agreement changed."""

    def __init__(
        self, evidence: Evidence, window_s: float, started: float, baselines: Mapping[str, float]
    ) -> None:
        """window_s: seconds in which a key counts once; baselines: stable's references, where known."""
        self.evidence = evidence
        self.window_s = window_s
        self.started = started
        self._baselines = dict(baselines)
        self._first_stable: dict[str, list[float]] = {}
        self._pending: dict[str, dict[str, Any]] = {}
        # key -> [last window, agreement losses known (or _WAITS), their mean]
        self._keys: dict[str, list[float]] = {}

    def admit(self, unit: str, arm: str, key: str | None, now: float, audited: bool) -> str:
        """A request arrives: `fresh` or `returning` where it is a unit of evidence, else empty.

        key: the sticky key, or None where the request is its own. audited: chosen, by hash, to be judged
        by the large model whatever it says.
        """
        if unit in self._pending:
            return ""
        digest = hashlib.blake2b(key.encode(), digest_size=8).hexdigest() if key is not None else None
        seen, before = False, None
        if digest is not None:
            window = int((now - self.started) // self.window_s)
            past = self._keys.get(digest)
            if past is None:
                past = self._keys[digest] = [window, 0, 0.0]
                if len(self._keys) > _MOST_KEYS:
                    self._keys.pop(next(iter(self._keys)))
            elif past[0] >= window or past[1] == _WAITS:
                return ""
            else:
                seen, before = True, past[2] if past[1] else None
                past[0] = window
        metrics = [
            name
            for name, comparison in self.evidence.comparisons.items()
            if not name.startswith("score:")
            and (audited or not comparison.metric.audited)
            and (name in self._baselines or not comparison.metric.baseline)
            and (not seen or name == "agreement")
        ]
        for name in metrics:
            self.evidence.comparisons[name].admit(unit, arm, before is not None)
        if digest is not None and "agreement" in metrics:
            known = int(past[1]) if past is not None else 0
            self._keys[digest][1] = _WAITS
        else:
            known = 0
        self._pending[unit] = {
            "arm": arm,
            "key": digest,
            "known": known,
            "before": before,
            "metrics": metrics,
        }
        if not metrics:
            return ""
        return "returning" if seen else "fresh"

    def observe(self, unit: str, values: Mapping[str, float | None]) -> str | None:
        """A unit's metrics (as in losses.to_loss); one left out or None is missing, so worst.

        Its arm, or None if the unit is unknown or counted in no metric.
        """
        pending = self._pending.pop(unit, None)
        if pending is None:
            return None
        for name in pending["metrics"]:
            loss = to_loss(name, values.get(name), self._baselines.get(name))
            comparison = self.evidence.comparisons[name]
            comparison.note(pending["arm"], values.get(name))
            comparison.resolve(unit, pending["arm"], loss, pending["before"])
            if name == "agreement" and (past := self._keys.get(pending["key"] or "")) is not None:
                past[1] = pending["known"] + 1
                past[2] += ((1.0 if loss is None else loss) - past[2]) / past[1]
        if pending["arm"] == "stable":
            self._learn_baselines(values)
        return str(pending["arm"]) if pending["metrics"] else None

    def _learn_baselines(self, values: Mapping[str, float | None]) -> None:
        for name, comparison in self.evidence.comparisons.items():
            value = values.get(name)
            if not comparison.metric.baseline or name in self._baselines or not value:
                continue
            first = self._first_stable.setdefault(name, [])
            first.append(value)
            if len(first) == NUM_BASELINE:
                self._baselines[name] = median(first)
                del self._first_stable[name]

    def lose_pending(self) -> None:
        """What was in flight when the gateway died is missing, so worst."""
        for unit in list(self._pending):
            self.observe(unit, {})

    def to_dict(self) -> dict[str, Any]:
        """The whole state, without the evidence, in plain values."""
        return {
            "window_s": self.window_s,
            "started": self.started,
            "baselines": self._baselines,
            "first_stable": self._first_stable,
            "pending": self._pending,
            "keys": self._keys,
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], evidence: Evidence) -> Units:
        """The units that `to_dict` wrote down, counting for the evidence."""
        units = cls(evidence, state["window_s"], state["started"], state["baselines"])
        units._first_stable = {name: list(values) for name, values in state["first_stable"].items()}
        units._pending = {unit: dict(pending) for unit, pending in state["pending"].items()}
        units._keys = {key: list(past) for key, past in state["keys"].items()}
        return units

"""Conditions: what is wrong right now, by the config's rules and by the built-in ones."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from alerts.config import RuleConfig
from alerts.evidence import DRIFT_LIMIT
from alerts.series import Samples, Window, is_counter, pick

CANARY_ROLLED_BACK = "CanaryRolledBack"
CANARY_PROMOTED = "CanaryPromoted"
CANARY_INCONCLUSIVE = "CanaryInconclusive"
QUALITY_DRIFT = "QualityDrift"
ROUTING_NOT_LIVE = "RoutingNotLive"
TAPE_DROPPING = "TapeDropping"
QUEUE_SATURATED = "QueueSaturated"
CONTROL_SILENT = "ControlSilent"
LARGE_UNAVAILABLE = "LargeModelUnavailable"
ANSWERS_DEGRADED = "AnswersDegraded"

BUILT_IN = (
    CANARY_ROLLED_BACK,
    CANARY_PROMOTED,
    CANARY_INCONCLUSIVE,
    QUALITY_DRIFT,
    ROUTING_NOT_LIVE,
    TAPE_DROPPING,
    QUEUE_SATURATED,
    CONTROL_SILENT,
    LARGE_UNAVAILABLE,
    ANSWERS_DEGRADED,
)
"""Alerts that need no rule (contract: Config file)."""

DRIFT_EVIDENCE = "tokentape:drift_evidence"

_OPS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


@dataclass(frozen=True, slots=True)
class Finding:
    """One condition that holds. labels tell it from others of the same name.

    for_s: how long it must go on holding before it fires. inhibited_by: names of alerts that silence it.
    """

    name: str
    summary: str
    description: str
    severity: str = "warning"
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    for_s: float = 0.0
    inhibited_by: Sequence[str] = ()


class Rule:
    """One [[alerts.rules]] entry with the memory it needs."""

    def __init__(self, config: RuleConfig) -> None:
        self.config = config
        longest = config.slow_window_s if config.kind == "burn" else config.window_s
        self._window = Window(longest)
        self._total = Window(longest)

    def look(self, samples: Samples, now: float) -> Finding | None:
        """Take in one set of samples; the finding while the condition holds."""
        config = self.config
        if config.kind == "drift":
            text = self._drift(samples)
        else:
            assert config.metric is not None
            found = pick(samples, config.metric, config.labels)
            self._window.add(now, sum(found) if found else None)
            if config.kind == "burn":
                assert config.total is not None
                totals = pick(samples, config.total, {})
                self._total.add(now, sum(totals) if totals else None)
                text = self._burn(now)
            else:
                text = self._threshold(now) if config.kind == "threshold" else self._absence(now)
        if text is None:
            return None
        return Finding(
            name=config.name,
            summary=config.summary or text,
            description=text,
            severity=config.severity,
            labels={"rule": config.kind},
            for_s=config.for_s,
            inhibited_by=tuple(config.inhibited_by),
        )

    def _threshold(self, now: float) -> str | None:
        config = self.config
        value = self._value(now)
        assert config.value is not None
        if value is None or not _OPS[config.op](value, config.value):
            return None
        over = "" if config.function == "last" else f" over {config.window_s:g} s"
        return f"{config.function} of {self._series()}{over} is {value:.6g}, {config.op} {config.value:g}"

    def _value(self, now: float) -> float | None:
        config = self.config
        if config.function in ("increase", "rate"):
            grown = self._window.increase(now, config.window_s)
            return grown if grown is None or config.function == "increase" else grown / config.window_s
        values = self._window.values(now, config.window_s)
        if not values:
            return None
        match config.function:
            case "mean":
                return sum(values) / len(values)
            case "min":
                return min(values)
            case "max":
                return max(values)
            case _:
                return values[-1]

    def _absence(self, now: float) -> str | None:
        config = self.config
        assert config.metric is not None
        if not self._window.covers(now, config.window_s):
            return None
        if not self._window.values(now, config.window_s):
            return f"{self._series()} was not there for {config.window_s:g} s"
        if is_counter(config.metric) and not self._window.increase(now, config.window_s):
            return f"{self._series()} stood still for {config.window_s:g} s"
        return None

    def _burn(self, now: float) -> str | None:
        config = self.config
        assert config.objective is not None
        rates = []
        for span in (config.fast_window_s, config.slow_window_s):
            bad, total = self._window.increase(now, span), self._total.increase(now, span)
            if not bad or not total:
                return None
            rates.append(bad / total / (1 - config.objective))
        if min(rates) < config.factor:
            return None
        return (
            f"the error budget of {config.objective:.6g} burns {rates[0]:.3g} times too fast over "
            f"{config.fast_window_s:g} s and {rates[1]:.3g} times over {config.slow_window_s:g} s "
            f"(limit {config.factor:g})"
        )

    def _drift(self, samples: Samples) -> str | None:
        values = pick(samples, DRIFT_EVIDENCE, self.config.labels)
        limit = self.config.value if self.config.value is not None else DRIFT_LIMIT
        if not values or max(values) < limit:
            return None
        return f"evidence of drift is {max(values):.4g}, limit {limit:g}"

    def _series(self) -> str:
        labels = ",".join(f'{name}="{value}"' for name, value in sorted(self.config.labels.items()))
        return f"{self.config.metric}{{{labels}}}" if labels else f"{self.config.metric}"


def built_in_rules(queue_limit: int) -> list[Rule]:
    """The built-in alerts that are rules over served metrics; queue_limit: choices that may wait."""
    return [
        Rule(
            RuleConfig(
                name=TAPE_DROPPING,
                kind="threshold",
                metric="tokentape:tape_dropped_total",
                function="increase",
                value=0.0,
                severity="critical",
                summary="The tape is losing rows: traces of this time are incomplete.",
            )
        ),
        Rule(
            RuleConfig(
                name=QUEUE_SATURATED,
                kind="threshold",
                metric="tokentape:num_requests_waiting",
                function="min",
                op=">=",
                value=max(1.0, 0.9 * queue_limit),
                window_s=30.0,
                for_s=30.0,
                summary="The queue is nearly full: requests wait long, and new ones are turned away.",
            )
        ),
        Rule(
            RuleConfig(
                name=LARGE_UNAVAILABLE,
                kind="threshold",
                metric="tokentape:large_available",
                function="max",
                op="<",
                value=1.0,
                window_s=10.0,
                severity="critical",
                summary="The large model's engine cannot be reached, or serves another model.",
            )
        ),
        Rule(
            RuleConfig(
                name=ANSWERS_DEGRADED,
                kind="threshold",
                metric="tokentape:requests_degraded_total",
                function="increase",
                value=0.0,
                severity="critical",
                summary="The small model wrote on alone, because the large one could not be had.",
            )
        ),
    ]

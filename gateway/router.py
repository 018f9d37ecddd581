"""A learned router: P(the large model agrees) from a position's signals and history; pure, no torch.

Weights are plain float32 values inside the policy, so they count in its hash and a recorded decision replays
from its own row. Sums run in a fixed order: BLAS would differ in the last bits.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import mul
from typing import Any

from gateway.core import Signals

FEATURES = ("top1_p", "gap", "log_gap", "entropy", "attn_entropy", "position", "run_share", "ema_acceptance")
"""What a router reads, in this order."""

PROBE = "probe"
"""What a router reads behind them, where it has a probe: the last hidden state along one direction."""

LOG_GAP_FLOOR = 1e-4
"""1 - gap is taken to be at least this, so that its logarithm stays finite."""


def features(signals: Signals, idx: int, run_share: float, ema_acceptance: float) -> tuple[float, ...]:
    """FEATURES of one position; a missing attention entropy counts as 0."""
    return (
        signals.top1_p,
        signals.gap,
        -math.log(max(1.0 - signals.gap, LOG_GAP_FLOOR)),
        signals.entropy,
        signals.attn_entropy or 0.0,
        math.log1p(idx),
        run_share,
        ema_acceptance,
    )


@dataclass(frozen=True, slots=True)
class Router:
    """Standardised features through a linear layer (hidden empty), or through two with ReLU between.

    mean, scale: [features]. hidden: [units][features], hidden_bias: [units]. output: [units or features].
    probe: [width of the small model's hidden state], or empty; its product with that state is one feature
    more. All values are float32. Raises ValueError where the shapes do not fit.
    """

    mean: tuple[float, ...]
    scale: tuple[float, ...]
    hidden: tuple[tuple[float, ...], ...]
    hidden_bias: tuple[float, ...]
    output: tuple[float, ...]
    bias: float
    probe: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        n = len(FEATURES) + bool(self.probe)
        widths = {len(self.mean), len(self.scale), *map(len, self.hidden)}
        inner = len(self.hidden) or n
        if widths != {n} or len(self.hidden_bias) != len(self.hidden) or len(self.output) != inner:
            raise ValueError(f"a router reads {n} features; its weights have other shapes")
        numbers = (*self.mean, *self.scale, *self.hidden_bias, *self.output, self.bias, *self.probe)
        if not all(map(math.isfinite, (*numbers, *(w for unit in self.hidden for w in unit)))):
            raise ValueError("a router's weights must be finite")
        if any(s <= 0 for s in self.scale):
            raise ValueError("a router's scales must be positive")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Router:
        """From what `asdict` gave, as JSON returns it. Raises ValueError."""
        try:
            return cls(
                mean=tuple(settings["mean"]),
                scale=tuple(settings["scale"]),
                hidden=tuple(map(tuple, settings["hidden"])),
                hidden_bias=tuple(settings["hidden_bias"]),
                output=tuple(settings["output"]),
                bias=settings["bias"],
                probe=tuple(settings.get("probe", ())),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"no router: {error}") from None

    @property
    def hash(self) -> str:
        """12 hex digits naming the weights."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    def can_read(self, signals: Signals) -> bool:
        """Whether the signals hold a hidden state of the probe's width, where there is a probe."""
        return not self.probe or len(signals.hidden or b"") == 2 * len(self.probe)

    def agreement(self, signals: Signals, idx: int, run_share: float, ema_acceptance: float) -> float:
        """P(the large model's own token is the small model's), in [0, 1].

        Raises ValueError for signals that it cannot read.
        """
        if not self.can_read(signals):
            raise ValueError(f"the router reads a hidden state of {len(self.probe)} values; none is at hand")
        inputs = features(signals, idx, run_share, ema_acceptance)
        if self.probe:
            state = struct.unpack(f"<{len(self.probe)}e", signals.hidden or b"")
            # Products of float16 and float32 are exact, and fsum rounds their sum once: no order matters.
            inputs += (math.fsum(map(mul, self.probe, state)),)
        x: Sequence[float] = [
            (value - mean) / scale for value, mean, scale in zip(inputs, self.mean, self.scale, strict=True)
        ]
        if self.hidden:
            x = [
                max(0.0, _dot(weights, x, bias))
                for weights, bias in zip(self.hidden, self.hidden_bias, strict=True)
            ]
        z = _dot(self.output, x, self.bias)
        return 1 / (1 + math.exp(-z)) if z >= 0 else math.exp(z) / (1 + math.exp(z))


def _dot(weights: Sequence[float], values: Sequence[float], start: float) -> float:
    total = start
    for weight, value in zip(weights, values, strict=True):
        total += weight * value
    return total

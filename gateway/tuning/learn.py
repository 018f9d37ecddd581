"""Learned routers: P(large agrees) from the signals, as logistic regression and a two-layer network.

Both also with the small model's last hidden state, which enters through one direction (the probe) that is
trained with the rest: whatever the network, a decision costs one product of that width more. Trained on
positions where both models' choices are known. Disagreements are rare, so both classes weigh the same in
training and the bias is shifted back afterwards, which leaves calibrated probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gateway.core import Signals
from gateway.policy import f32
from gateway.router import FEATURES, Router, features
from gateway.tuning.judge import TARGETS, Examples, Judged, judge
from gateway.tuning.run import Answer

HIDDEN_UNITS = 16
EPOCHS = 600
PATIENCE = 60
LEARNING_RATE = 0.02
WEIGHT_DECAY = 1e-3
PROBE_DECAY = 1.0
VALIDATION_SHARE = 0.25
LEAST_SPREAD = 1e-3


def examples(answers: Sequence[Answer], protect_first: int, max_small_run: int) -> Examples:
    """Every labelled position of the answers behind the protected prefix."""
    rows: list[tuple[float, ...]] = []
    agrees: list[bool] = []
    group: list[int] = []
    hidden: list[bytes | None] = []
    for number, answer in enumerate(answers):
        c = answer.columns
        for i in answer.written:
            said = answer.signals(i)
            if said is None or c["large_choice"][i] is None or c["idx"][i] < protect_first:
                continue
            run_share = c["run_length"][i] / max_small_run
            rows.append(features(said, c["idx"][i], run_share, c["ema_acceptance"][i]))
            agrees.append(c["small_choice"][i] == c["large_choice"][i])
            group.append(number)
            hidden.append(said.hidden)
    return _examples(rows, agrees, [1.0] * len(rows), group, hidden)


def tape_examples(columns: dict[str, list[Any]], max_small_run: int = 64) -> Examples:
    """Audited positions from the tape: columns request_id, the signals, idx, run_length, ema_acceptance,
    small_choice, large_choice, propensity (weights are its inverse), and perhaps hidden."""
    rows: list[tuple[float, ...]] = []
    agrees: list[bool] = []
    weight: list[float] = []
    group: list[int] = []
    hidden: list[bytes | None] = []
    numbers: dict[str, int] = {}
    for row in zip(*columns.values(), strict=True):
        c = dict(zip(columns, row, strict=True))
        said = Signals(c["top1_p"], c["gap"], c["entropy"], c["attn_entropy"])
        rows.append(features(said, c["idx"], c["run_length"] / max_small_run, c["ema_acceptance"]))
        agrees.append(c["small_choice"] == c["large_choice"])
        weight.append(1 / (c["propensity"] or 1.0))
        group.append(numbers.setdefault(c["request_id"], len(numbers)))
        hidden.append(c.get("hidden"))
    return _examples(rows, agrees, weight, group, hidden)


def join(parts: Sequence[Examples]) -> Examples:
    """Several sets as one; their prompts stay apart."""
    groups, first = [], 0
    for part in parts:
        groups.append(part.group + first)
        first += int(part.group.max()) + 1 if len(part) else 0
    return Examples(
        np.concatenate([part.x for part in parts]),
        np.concatenate([part.agrees for part in parts]),
        np.concatenate([part.weight for part in parts]),
        np.concatenate(groups),
        np.concatenate([part.hidden for part in parts]),
    )


def train(data: Examples, hidden_units: int, *, probes: bool = False, seed: int = 0) -> Router:
    """Fit a router: logistic regression (0 hidden units) or two layers; probes: with the hidden state.

    Stops by loss on prompts set aside. Raises ValueError where every label is the same.
    """
    if not 0 < data.agrees.sum() < len(data):
        raise ValueError("the labels all say the same; nothing can be learned from them")
    groups = np.unique(data.group)
    order = np.random.default_rng(seed).permutation(groups)
    aside = set(order[: max(1, int(len(groups) * VALIDATION_SHARE))].tolist())
    validates = np.array([g in aside for g in data.group])
    if not 0 < data.agrees[~validates].sum() < (~validates).sum() or not validates.any():
        validates = np.zeros(len(data), dtype=bool)
    inputs = Standard.of(data.x[~validates])
    states = Standard.of((data.hidden if probes else data.hidden[:, :0])[~validates].astype(np.float64))
    model = _Network(inputs.varies, states.varies.size, hidden_units, torch.Generator().manual_seed(seed))
    x = torch.tensor(inputs(data.x), dtype=torch.float32)
    h = torch.tensor(states(data.hidden if probes else data.hidden[:, :0]), dtype=torch.float32)
    y = torch.tensor(data.agrees, dtype=torch.float32)
    positive = float(data.weight[data.agrees].sum())
    negative = float(data.weight[~data.agrees].sum())
    total = positive + negative
    balance = np.where(data.agrees, total / (2 * positive), total / (2 * negative)) * data.weight
    weight = torch.tensor(balance, dtype=torch.float32)
    fit, check = torch.tensor(~validates), torch.tensor(validates if validates.any() else ~validates)
    _descend(model, x, h, y, weight, fit, check)
    # Weighing the classes alike multiplied the odds by this ratio; taking it back restores probabilities.
    shift = float(np.log(negative / positive))
    return _router(model, inputs, states, shift)


@dataclass(frozen=True, slots=True)
class Standard:
    """Columns to mean 0 and deviation 1. What never varied in training says nothing, and becomes 0."""

    mean: np.ndarray
    scale: np.ndarray
    varies: np.ndarray

    @classmethod
    def of(cls, x: np.ndarray) -> Standard:
        """By the columns of x [n, columns]."""
        spread = x.std(axis=0)
        varies = spread > LEAST_SPREAD
        return cls(x.mean(axis=0), np.where(varies, spread, 1.0), varies)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """x [n, columns], standardised."""
        return np.asarray((x - self.mean) / self.scale * self.varies)


class _Network(nn.Module):
    """Features, and the probe's reading of `width` hidden values where there are any, to a logit."""

    def __init__(self, varies: np.ndarray, width: int, hidden_units: int, generator: torch.Generator) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.zeros(width))
        n = len(varies) + bool(width)
        widths = [n, hidden_units, 1] if hidden_units else [n, 1]
        layers: list[nn.Module] = []
        for a, b in pairwise(widths):
            layer = nn.Linear(a, b)
            with torch.no_grad():
                layer.weight.copy_(torch.randn(b, a, generator=generator) * (1.0 / a) ** 0.5)
                layer.bias.zero_()
            layers += [layer, nn.ReLU()]
        self.linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
        self.layers = nn.Sequential(*layers[:-1])
        with torch.no_grad():
            # The gradient of what never varied is zero, so these weights stay zero.
            self.linear[0].weight[:, : len(varies)] *= torch.tensor(varies, dtype=torch.float32)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        if self.probe.numel():
            # By the root of the width, so that a step of Adam, alike in every weight, moves the sum gently.
            x = torch.cat([x, (h @ self.probe)[:, None] / self.probe.numel() ** 0.5], dim=1)
        return self.layers(x).squeeze(-1)  # type: ignore[no-any-return]


def _descend(
    model: _Network, x: Tensor, h: Tensor, y: Tensor, weight: Tensor, fit: Tensor, check: Tensor
) -> None:
    """Adam on all of the data at once; keeps the weights with the lowest loss on `check`."""
    optimizer = torch.optim.AdamW(
        [
            {"params": model.layers.parameters(), "weight_decay": WEIGHT_DECAY},
            {"params": [model.probe], "weight_decay": PROBE_DECAY},
        ],
        LEARNING_RATE,
    )

    def loss(chosen: Tensor) -> Tensor:
        z = model(x[chosen], h[chosen])
        each = F.binary_cross_entropy_with_logits(z, y[chosen], weight[chosen], reduction="sum")
        return each / weight[chosen].sum()

    best, best_state, waited = float("inf"), model.state_dict(), 0
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        loss(fit).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with torch.no_grad():
            now = float(loss(check))
        if now < best - 1e-5:
            best, waited = now, 0
            best_state = {k: v.clone() for k, v in model.state_dict().items()}
        elif (waited := waited + 1) > PATIENCE:
            break
    model.load_state_dict(best_state)


def _router(model: _Network, inputs: Standard, states: Standard, shift: float) -> Router:
    hidden, output = (model.linear[0], model.linear[1]) if len(model.linear) == 2 else (None, model.linear[0])
    direction = model.probe.detach().numpy() * states.varies / states.scale / max(1, states.mean.size) ** 0.5
    probe = _floats(direction)
    # The probe reads raw hidden values; what standardising took off them is this feature's mean.
    mean, scale = inputs.mean, inputs.scale
    if probe:
        mean, scale = np.append(mean, np.dot(probe, states.mean)), np.append(scale, 1.0)
    return Router(
        mean=_floats(mean),
        scale=_floats(scale),
        hidden=() if hidden is None else tuple(_floats(row) for row in hidden.weight.detach().numpy()),
        hidden_bias=() if hidden is None else _floats(hidden.bias.detach().numpy()),
        output=_floats(output.weight.detach().numpy()[0]),
        # Balanced odds are the true ones times negative / positive; shift is that ratio's logarithm.
        bias=f32(float(output.bias.detach()[0]) - shift),
        probe=probe,
    )


def _floats(values: np.ndarray) -> tuple[float, ...]:
    return tuple(np.asarray(values, dtype=np.float32).tolist())


def predict(router: Router, data: Examples) -> np.ndarray:
    """P(large agrees) [n] of every example; vectorised, for reports only."""
    x = data.x
    if router.probe:
        x = np.column_stack([x, data.hidden.astype(np.float64) @ np.array(router.probe)])
    x = (x - np.array(router.mean)) / np.array(router.scale)
    if router.hidden:
        x = np.maximum(x @ np.array(router.hidden).T + np.array(router.hidden_bias), 0.0)
    return np.asarray(1 / (1 + np.exp(-(x @ np.array(router.output) + router.bias))))


@dataclass(frozen=True, slots=True)
class Learned:
    """The router to use (None where the gap was not beaten), and every rule's measures."""

    router: Router | None
    kind: str
    judged: tuple[Judged, ...]


def learn(training: Examples, held: Examples, say: Callable[[str], None]) -> Learned:
    """Train every kind on one set of prompts, judge them with the gap on another, keep the best one."""
    judged = [judge("gap", held.gap, held)]
    routers: dict[str, Router] = {}
    kinds = [(name, units, False) for name, units in (("logistic", 0), ("mlp", HIDDEN_UNITS))]
    if training.hidden.shape[1]:
        kinds += [(f"{name} + hidden state", units, True) for name, units, _ in kinds]
    for kind, units, probes in kinds:
        routers[kind] = train(training, units, probes=probes)
        judged.append(judge(kind, predict(routers[kind], held), held))
        say(f"router {kind}: AUROC {judged[-1].auroc:.4f} (gap {judged[0].auroc:.4f})")
    best = max(judged[1:], key=lambda one: one.kept[TARGETS[1]])
    chosen = routers[best.name] if best.beats_the_gap else None
    return Learned(chosen, best.name, tuple(judged))


def _examples(
    rows: list[tuple[float, ...]],
    agrees: list[bool],
    weight: list[float],
    group: list[int],
    hidden: list[bytes | None],
) -> Examples:
    states = [state for state in hidden if state is not None]
    if len(states) < len(rows):
        states = [b""] * len(rows)
    return Examples(
        np.array(rows, dtype=np.float64).reshape(-1, len(FEATURES)),
        np.array(agrees, dtype=bool),
        np.array(weight, dtype=np.float64),
        np.array(group, dtype=np.int64),
        np.frombuffer(b"".join(states), dtype="<f2").reshape(len(rows), -1 if rows else 0),
    )

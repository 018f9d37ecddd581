"""Learned routers: P(large agrees) from the signals, as logistic regression and a two-layer network.

Trained on positions where both models' choices are known. Disagreements are rare, so both classes weigh the
same in training and the bias is shifted back afterwards, which leaves calibrated probabilities.
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
VALIDATION_SHARE = 0.25
LEAST_SPREAD = 1e-3


def examples(answers: Sequence[Answer], protect_first: int, max_small_run: int) -> Examples:
    """Every labelled position of the answers behind the protected prefix."""
    rows: list[tuple[float, ...]] = []
    agrees: list[bool] = []
    group: list[int] = []
    for number, answer in enumerate(answers):
        c = answer.columns
        for i in answer.written:
            if c["gap"][i] is None or c["large_choice"][i] is None or c["idx"][i] < protect_first:
                continue
            said = Signals(c["top1_p"][i], c["gap"][i], c["entropy"][i], c["attn_entropy"][i])
            run_share = c["run_length"][i] / max_small_run
            rows.append(features(said, c["idx"][i], run_share, c["ema_acceptance"][i]))
            agrees.append(c["small_choice"][i] == c["large_choice"][i])
            group.append(number)
    return _examples(rows, agrees, [1.0] * len(rows), group)


def tape_examples(columns: dict[str, list[Any]], max_small_run: int = 64) -> Examples:
    """Audited positions from the tape: columns request_id, the signals, idx, run_length, ema_acceptance,
    small_choice, large_choice, propensity (weights are its inverse)."""
    rows: list[tuple[float, ...]] = []
    agrees: list[bool] = []
    weight: list[float] = []
    group: list[int] = []
    numbers: dict[str, int] = {}
    for row in zip(*columns.values(), strict=True):
        c = dict(zip(columns, row, strict=True))
        said = Signals(c["top1_p"], c["gap"], c["entropy"], c["attn_entropy"])
        rows.append(features(said, c["idx"], c["run_length"] / max_small_run, c["ema_acceptance"]))
        agrees.append(c["small_choice"] == c["large_choice"])
        weight.append(1 / (c["propensity"] or 1.0))
        group.append(numbers.setdefault(c["request_id"], len(numbers)))
    return _examples(rows, agrees, weight, group)


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
    )


def train(data: Examples, hidden_units: int, seed: int = 0) -> Router:
    """Fit a router: logistic regression (0 hidden units) or two layers. Stops by loss on prompts set aside.

    Raises ValueError where every label is the same.
    """
    if not 0 < data.agrees.sum() < len(data):
        raise ValueError("the labels all say the same; nothing can be learned from them")
    generator = torch.Generator().manual_seed(seed)
    groups = np.unique(data.group)
    order = np.random.default_rng(seed).permutation(groups)
    aside = set(order[: max(1, int(len(groups) * VALIDATION_SHARE))].tolist())
    validates = np.array([g in aside for g in data.group])
    if not 0 < data.agrees[~validates].sum() < (~validates).sum() or not validates.any():
        validates = np.zeros(len(data), dtype=bool)
    mean = data.x[~validates].mean(axis=0)
    spread = data.x[~validates].std(axis=0)
    # What never varied in training says nothing, and must not speak up where it does vary.
    varies = spread > LEAST_SPREAD
    scale = np.where(varies, spread, 1.0)
    x = torch.tensor((data.x - mean) / scale * varies, dtype=torch.float32)
    y = torch.tensor(data.agrees, dtype=torch.float32)
    positive = float(data.weight[data.agrees].sum())
    negative = float(data.weight[~data.agrees].sum())
    total = positive + negative
    balance = np.where(data.agrees, total / (2 * positive), total / (2 * negative)) * data.weight
    weight = torch.tensor(balance, dtype=torch.float32)
    fit, check = torch.tensor(~validates), torch.tensor(validates if validates.any() else ~validates)
    model = _network(hidden_units, generator)
    with torch.no_grad():
        # Their gradient is zero, so their weights stay zero.
        first = next(layer for layer in model if isinstance(layer, nn.Linear))
        first.weight *= torch.tensor(varies, dtype=torch.float32)
    _descend(model, x, y, weight, fit, check)
    # Weighing the classes alike multiplied the odds by this ratio; taking it back restores probabilities.
    shift = float(np.log(negative / positive))
    return _router(model, mean, scale, shift)


def _network(hidden_units: int, generator: torch.Generator) -> nn.Sequential:
    widths = [len(FEATURES), hidden_units, 1] if hidden_units else [len(FEATURES), 1]
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layer = nn.Linear(a, b)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(b, a, generator=generator) * (1.0 / a) ** 0.5)
            layer.bias.zero_()
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _descend(model: nn.Sequential, x: Tensor, y: Tensor, weight: Tensor, fit: Tensor, check: Tensor) -> None:
    """Adam on all of the data at once; keeps the weights with the lowest loss on `check`."""
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    def loss(chosen: Tensor) -> Tensor:
        z = model(x[chosen]).squeeze(-1)
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


def _router(model: nn.Sequential, mean: np.ndarray, scale: np.ndarray, shift: float) -> Router:
    linear = [layer for layer in model if isinstance(layer, nn.Linear)]
    hidden, output = (linear[0], linear[1]) if len(linear) == 2 else (None, linear[0])
    return Router(
        mean=_floats(mean),
        scale=_floats(scale),
        hidden=() if hidden is None else tuple(_floats(row) for row in hidden.weight.detach().numpy()),
        hidden_bias=() if hidden is None else _floats(hidden.bias.detach().numpy()),
        output=_floats(output.weight.detach().numpy()[0]),
        # Balanced odds are the true ones times negative / positive; shift is that ratio's logarithm.
        bias=f32(float(output.bias.detach()[0]) - shift),
    )


def _floats(values: np.ndarray) -> tuple[float, ...]:
    return tuple(np.asarray(values, dtype=np.float32).tolist())


def predict(router: Router, data: Examples) -> np.ndarray:
    """P(large agrees) [n] of every example; vectorised, for reports only."""
    x = (data.x - np.array(router.mean)) / np.array(router.scale)
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
    """Train both kinds on one set of prompts, judge them with the gap on another, keep the better one."""
    judged = [judge("gap", held.gap, held)]
    routers: dict[str, Router] = {}
    for kind, units in (("logistic", 0), ("mlp", HIDDEN_UNITS)):
        routers[kind] = train(training, units)
        judged.append(judge(kind, predict(routers[kind], held), held))
        say(f"router {kind}: AUROC {judged[-1].auroc:.4f} (gap {judged[0].auroc:.4f})")
    better = max(judged[1:], key=lambda one: one.kept[TARGETS[1]])
    chosen = routers[better.name] if better.beats_the_gap else None
    return Learned(chosen, better.name, tuple(judged))


def _examples(
    rows: list[tuple[float, ...]], agrees: list[bool], weight: list[float], group: list[int]
) -> Examples:
    return Examples(
        np.array(rows, dtype=np.float64).reshape(-1, len(FEATURES)),
        np.array(agrees, dtype=bool),
        np.array(weight, dtype=np.float64),
        np.array(group, dtype=np.int64),
    )

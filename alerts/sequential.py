"""Evidence that may be looked at after every unit: betting e-processes and an e-CUSUM.

A bettor starts with wealth 1 and stakes a share `lambda` on every difference y it has not yet seen.
Where the hypothesis holds, wealth is a non-negative supermartingale, so it ever reaches 1/alpha with
probability at most alpha (Ville's inequality; Waudby-Smith & Ramdas, "Estimating means of bounded
random variables by betting"; e-detectors: Shin, Ramdas & Rinaldo).

Losses lie in [0, 1]. d is the canary's mean loss minus the stable arm's in one block, in [-1, 1]; m is
the margin, in loss units. All processes take arrays of runs as well as single numbers, so that a
simulation and the product run the same code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

STAKES = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Stakes of the bettors whose wealth is averaged, as shares of the largest safe stake."""

_MOST_LOG_WEALTH = 600.0


class EProcess:
    """Mean wealth over several stakes; evidence against one hypothesis on the mean of d.

    `harm`: the hypothesis is "the canary is worse by at most m"; large wealth speaks against the canary.
    `pass`: the hypothesis is "the canary is worse by at least m"; large wealth speaks for the canary.
    """

    def __init__(self, side: str, margin: float, runs: tuple[int, ...] = ()) -> None:
        """side: `harm` or `pass`; margin in [0, 1); runs: the shape of independent runs, () for one.

        Raises ValueError on another side or margin.
        """
        if side not in ("harm", "pass"):
            raise ValueError(f"side: {side!r} is neither 'harm' nor 'pass'")
        if not 0 <= margin < 1:
            raise ValueError(f"margin: {margin} is not in [0, 1)")
        self.side = side
        self.margin = margin
        # y = d - m lies in [-1-m, 1-m]: a stake below 1/(1+m) on y, or 1/(1-m) on -y, cannot ruin a bettor.
        room = 1 + margin if side == "harm" else 1 - margin
        sign = 1.0 if side == "harm" else -1.0
        self._stakes: Floats = sign * np.array(STAKES) / room
        self._log_wealth: Floats = np.zeros((*runs, len(STAKES)))

    def update(self, d: float | Floats) -> None:
        """Take in one block's difference d, in [-1, 1], one for every run."""
        y = np.asarray(d, dtype=np.float64) - self.margin
        self._log_wealth += np.log1p(self._stakes * y[..., None])

    @property
    def values(self) -> Floats:
        """Wealth now, one number a run; 1 before the first block."""
        return np.asarray(np.exp(np.minimum(self._log_wealth, _MOST_LOG_WEALTH)).mean(axis=-1))

    @property
    def value(self) -> float:
        """Wealth now, of a single run."""
        return float(self.values)

    def to_dict(self) -> dict[str, Any]:
        """The whole state in plain values."""
        return {"side": self.side, "margin": self.margin, "log_wealth": self._log_wealth.tolist()}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> EProcess:
        """The process that `to_dict` wrote down."""
        process = cls(state["side"], state["margin"])
        process._log_wealth = np.array(state["log_wealth"], dtype=np.float64)
        return process


class ECusum:
    """S = max(S, 1) * (1 + stake * (d - margin)): evidence that the canary turned worse at some moment.

    Without drift the mean time until S reaches A is at least A blocks. That bounds how often it calls,
    not the probability that it ever does.
    """

    def __init__(self, margin: float, stake: float = 0.4, runs: tuple[int, ...] = ()) -> None:
        """margin in [0, 1); stake: at most 0.4, so that differences in [-2, 1] cannot ruin it."""
        if not 0 <= margin < 0.5:
            raise ValueError(f"margin: {margin} is not in [0, 0.5)")
        if not 0 < stake <= 0.4:
            raise ValueError(f"stake: {stake} is not in (0, 0.4]")
        self.margin = margin
        self.stake = stake
        self._log_s: Floats = np.zeros(runs)

    def update(self, d: float | Floats) -> None:
        """Take in one block's difference d, in [-2, 2], one for every run."""
        y = np.asarray(d, dtype=np.float64) - self.margin
        self._log_s = np.asarray(np.maximum(self._log_s, 0.0) + np.log1p(self.stake * y))

    @property
    def values(self) -> Floats:
        """S now, one number a run; 1 before the first block."""
        return np.asarray(np.exp(np.minimum(self._log_s, _MOST_LOG_WEALTH)))

    @property
    def value(self) -> float:
        """S now, of a single run."""
        return float(self.values)

    def to_dict(self) -> dict[str, Any]:
        """The whole state in plain values."""
        return {"margin": self.margin, "stake": self.stake, "log_s": self._log_s.tolist()}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> ECusum:
        """The process that `to_dict` wrote down."""
        process = cls(state["margin"], state["stake"])
        process._log_s = np.array(state["log_s"], dtype=np.float64)
        return process


class Blocks:
    """Pairs the arms: every block holds at least one unit of each arm, chosen when units are admitted.

    A block closes with the first unit that gives it both arms. Which units share a block depends on
    arms and order of arrival alone, never on losses; blocks are read in the order they closed, so a slow
    answer delays evidence and cannot choose its place in it.
    """

    def __init__(self) -> None:
        self._closed: list[dict[str, list[Any]]] = []
        self._open: dict[str, list[Any]] = {}
        self._where: dict[str, list[Any]] = {}

    def admit(self, unit: str, canary: bool) -> None:
        """A unit arrives; unit names are unique among those unresolved."""
        if unit in self._where:
            raise ValueError(f"unit {unit!r} is already waiting")
        slot: list[Any] = [canary, False, None]
        self._open[unit] = slot
        self._where[unit] = slot
        if len({other[0] for other in self._open.values()}) == 2:
            self._closed.append(self._open)
            self._open = {}

    def resolve(self, unit: str, loss: float | None) -> bool:
        """A unit's loss in [-1, 1] is known, or None: it is missing for good. False for an unknown unit."""
        slot = self._where.pop(unit, None)
        if slot is None:
            return False
        slot[1], slot[2] = True, loss
        return True

    def take(self) -> list[tuple[float, float]]:
        """(d for harm, d for pass) of each block that is complete and has none incomplete before it.

        A missing loss is the worst value, 1, in both arms. For the pass it is worst for the canary: a
        missing stable loss is 0 there, so losing observations never helps a canary.
        """
        taken: list[tuple[float, float]] = []
        while self._closed and all(slot[1] for slot in self._closed[0].values()):
            slots = list(self._closed.pop(0).values())
            canary = [1.0 if loss is None else loss for is_canary, _, loss in slots if is_canary]
            stable = [loss for is_canary, _, loss in slots if not is_canary]
            stable_worst = [1.0 if loss is None else loss for loss in stable]
            stable_best = [0.0 if loss is None else loss for loss in stable]
            mean = sum(canary) / len(canary)
            taken.append(
                (mean - sum(stable_worst) / len(stable), mean - sum(stable_best) / len(stable)),
            )
        return taken

    def to_dict(self) -> dict[str, Any]:
        """The whole state in plain values."""
        return {"closed": self._closed, "open": self._open}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Blocks:
        """The blocks that `to_dict` wrote down."""
        blocks = cls()
        blocks._closed = [{unit: list(slot) for unit, slot in block.items()} for block in state["closed"]]
        blocks._open = {unit: list(slot) for unit, slot in state["open"].items()}
        for block in (*blocks._closed, blocks._open):
            blocks._where |= {unit: slot for unit, slot in block.items() if not slot[1]}
        return blocks


def units_until(
    differences: Floats, margin: float, side: str, alpha: float, weight: float = 1.0
) -> npt.NDArray[np.int64]:
    """Blocks each run needs until weight * wealth reaches 1/alpha; differences: (blocks, runs).

    Runs that never get there say blocks + 1.
    """
    blocks, _ = differences.shape
    stakes = EProcess(side, margin)._stakes
    log_wealth = np.log1p(stakes[:, None, None] * (differences - margin)).cumsum(axis=1)
    values = np.exp(np.minimum(log_wealth, _MOST_LOG_WEALTH)).mean(axis=0)
    passed = weight * values >= 1 / alpha
    first: npt.NDArray[np.int64] = np.where(passed.any(axis=0), passed.argmax(axis=0) + 1, blocks + 1)
    return first

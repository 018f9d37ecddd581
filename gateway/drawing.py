"""Drawing tokens, exactly as the contract says: A -> temperature, top_k, top_p, min_p, renormalised = p.

A token is argmax(log p + G) with counter-based Gumbel noise G(seed, choice, position, token) that all models
share: where two models' distributions are close they draw the same token, and a verified draft is "right"
simply when it equals the large model's own draw (Gumbel-max coupling; Daliri et al. 2025, arXiv 2408.07978).

Few tokens can win: the most likely one and its noise say how much the others need, the noise has a largest
value, and a token's uniform says before any logarithm whether it may reach that. Only of those few is asked
whether top_k, top_p and min_p keep them. Rows go together, and none depends on another.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gateway.core import Sampling

Array = NDArray[Any]

MOST_NOISE = 17.33
"""No noise is larger, in nats: its uniform has 24 bits."""

GROUP = 16
"""Rows that go together: a hot row has 100,000 tokens that might win, and caches hold few such rows."""


class Draw(NamedTuple):
    """What to draw from row `row` of a pass' logits; sampling.temperature is above 0.

    best, top: the lowest id of the row's largest logit, and that logit. draft: a token of which is asked
    whether it can be drawn, or None; draft_logit: its logit.
    """

    row: int
    sampling: Sampling
    choice: int
    position: int
    best: int
    top: float
    draft: int | None
    draft_logit: float


class Drawn(NamedTuple):
    """token: argmax(log p + G), lowest id on ties. allowed: whether p(draft) > 0; False without a draft."""

    token: int
    allowed: bool


def draw(logits: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
    """One Drawn a Draw, from A's logits float32 [rows, vocab]; a few waits for a device, not one a row.

    Raises ValueError where a row's logits are NaN.
    """
    groups = range(0, len(draws), GROUP)
    return [drawn for first in groups for drawn in _draw(logits, draws[first : first + GROUP])]


def _draw(logits: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
    temperature = np.array([d.sampling.temperature for d in draws])
    top = np.array([d.top for d in draws]) / temperature
    keys = np.array([noise_key(d.sampling.seed, d.choice, d.position) for d in draws], np.uint64)
    # The most likely token is always kept, so none wins that has less than its z + G.
    needed = top + gumbel(uniform_bits(keys, np.array([d.best for d in draws])))
    kept = top + [math.log(d.sampling.min_p) if d.sampling.min_p > 0 else -math.inf for d in draws]
    bound = np.maximum(needed - MOST_NOISE, kept) * temperature
    # In float32 it is taken a little too low: what is too much is dropped by the exact tests below.
    bound = (bound - 1e-5 * (1 + np.abs(bound))).astype(np.float32)
    find = above if logits.device.type == "cpu" else above_on_device
    counts, tokens, values = find(logits, [d.row for d in draws], bound)
    z = values / np.repeat(temperature, counts)
    bits = uniform_bits(np.repeat(keys, counts), tokens)
    # z + G >= needed only where 1 - u <= 1 - exp(-exp(z - needed)), which is below exp(z - needed).
    most = np.exp((z - np.repeat(needed, counts)).astype(np.float32))
    near = np.flatnonzero((2**24 - bits).astype(np.float32) - 0.5 <= (1 + 1e-5) * 2**24 * most)
    ends = counts.cumsum()
    row = np.searchsorted(ends, near, side="right")
    near = near[np.lexsort((-(z[near] + gumbel(bits[near])), row))]
    near_ends = np.bincount(row, minlength=len(draws)).cumsum()
    drawn = []
    for i, d in enumerate(draws):
        here, floor = slice(ends[i] - counts[i], ends[i]), float(bound[i]) / d.sampling.temperature
        likely = Likely(logits[d.row], d.sampling, tokens[here], z[here], floor)
        best_first = near[near_ends[i - 1] if i else 0 : near_ends[i]]
        allowed_first = (int(tokens[j]) for j in best_first if likely.allow(int(tokens[j]), float(z[j])))
        token = next(allowed_first, None)
        if token is None:
            raise ValueError(f"no token can be drawn: the logits of row {d.row} are not numbers")
        allowed = d.draft is not None and likely.allow(d.draft, d.draft_logit / d.sampling.temperature)
        drawn.append(Drawn(token, allowed))
    return drawn


class Likely(NamedTuple):
    """The tokens of one position whose z, logit / temperature, is above `floor`.

    logits: of all tokens, [vocab]. tokens: ids, ascending; z: float64; both [n], the most likely among them.
    """

    logits: Tensor
    sampling: Sampling
    tokens: Array
    z: Array
    floor: float

    def allow(self, token: int, own: float) -> bool:
        """Whether p(token) > 0; own: the token's z."""
        said = self._allow(token, own)
        if said is None:
            z = self.logits.double().cpu().numpy() / self.sampling.temperature
            said = self._replace(tokens=np.arange(len(z)), z=z, floor=-math.inf)._allow(token, own)
        return bool(said)

    def _allow(self, token: int, own: float) -> bool | None:
        """Whether p(token) > 0; None where that hangs on tokens that are not here."""
        s, z, vocab = self.sampling, self.z, len(self.logits)
        if own == -math.inf or (s.top_k == 0 and s.top_p == 1 and s.min_p == 0):
            return own > -math.inf
        most, num_unseen, ahead = z.max(), vocab - len(z), z > own
        if s.min_p > 0 and own < most + math.log(s.min_p):
            return False
        if 0 < s.top_k < vocab:
            if ahead.sum() >= s.top_k:
                return False
            if own <= self.floor:
                return None
            if s.top_k <= len(z):
                z, num_unseen = z[z >= np.partition(z, -s.top_k)[-s.top_k]], 0
        ahead |= (self.z == own) & (self.tokens < token)
        if s.top_p == 1 or not ahead.any():
            return True
        # It is kept if the mass before it is below top_p of all, of which what is unseen has little.
        before, mass = np.exp(self.z[ahead] - most).sum(), np.exp(z - most).sum()
        if before >= s.top_p * (mass + num_unseen * math.exp(self.floor - most)):
            return False
        return True if own > self.floor and before < s.top_p * mass else None


def above(logits: Tensor, rows: Sequence[int], bounds: Array) -> tuple[Array, Array, Array]:
    """The tokens of these rows of logits [any, vocab] that are above their row's bound: how many a row, their
    ids, row by row and ascending, their logits. Logits, here on the host, and bounds are float32."""
    given = [logits[row].numpy() for row in rows]
    found = [np.flatnonzero(x > bound) for x, bound in zip(given, bounds, strict=True)]
    values = [x[tokens] for x, tokens in zip(given, found, strict=True)]
    return np.array([len(tokens) for tokens in found]), np.concatenate(found), np.concatenate(values)


def above_on_device(logits: Tensor, rows: Sequence[int], bounds: Array) -> tuple[Array, Array, Array]:
    """The same wherever the logits lie; on a CPU it is slower."""
    given = logits[rows]
    found = torch.nonzero(given > torch.from_numpy(bounds).to(logits.device)[:, None])
    values = given[found[:, 0], found[:, 1]].cpu().numpy()
    row, tokens = found.cpu().numpy().T
    return np.bincount(row, minlength=len(rows)), tokens, values


def gumbel(bits: Array) -> Array:
    """Standard Gumbel noise, float64, of uniforms given by their 24 bits."""
    uniform = (torch.from_numpy(bits.astype(np.float64)) + 0.5) / 2**24
    noise: Array = (-torch.log(-torch.log(uniform))).numpy()
    return noise


def uniform_bits(keys: Array, tokens: Array) -> Array:
    """24 bits, uint32, a pure function of a position's key (uint64) and a token; of arrays, one by one."""
    h = _mix32(tokens.astype(np.uint32) ^ keys.astype(np.uint32))
    h = _mix32(h + (keys >> 32).astype(np.uint32))
    h >>= 8
    return h


def _mix32(h: Array) -> Array:
    """MurmurHash3's 32-bit finalizer."""
    h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
    h ^= h >> 16
    return h


def noise_key(seed: int, choice: int, position: int) -> int:
    """64 bits that say which noise a position's tokens get."""
    counter = f"{seed}:{choice}:{position}".encode()
    return int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "little")

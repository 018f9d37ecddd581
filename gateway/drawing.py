"""Drawing a token, exactly as the contract says: A -> temperature, top_k, top_p, min_p, renormalised = p.

A token is argmax(log p + G) with counter-based Gumbel noise G(seed, choice, position, token) that all models
share: where two models' distributions are close they draw the same token, and a verified draft is "right"
simply when it equals the large model's own draw (Gumbel-max coupling; Daliri et al. 2025, arXiv 2408.07978).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gateway.core import Sampling

NOISE_RANGE = 20.25
"""Largest difference in nats of two noises whose uniforms have 24 bits: a token further below cannot win."""

_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Chances:
    """The tokens that can be drawn at one position, out of a wide vocabulary usually a few hundred.

    tokens: int64 [n], ascending. log_p: float64 [n], log p but for a constant. A token that p allows is
    missing where no noise can lift it. cut: whether top_k, top_p or min_p took tokens away: then all less
    likely ones are gone too.
    """

    tokens: Tensor
    log_p: Tensor
    cut: bool

    @classmethod
    def of(cls, logits: Tensor, sampling: Sampling, top: float) -> Chances:
        """From A's logits [vocab], whose largest is `top`; the temperature is above 0."""
        # In float32 the bound is taken a little too low: what is too much is dropped by the exact one below.
        reach = NOISE_RANGE * sampling.temperature
        tokens = torch.nonzero(logits > top - reach - 1e-5 * (reach + abs(top))).squeeze(-1)
        z = logits[tokens].double() / sampling.temperature
        top_k = sampling.top_k if sampling.top_k < logits.numel() else 0
        if sampling.top_p < 1.0 and len(tokens) < top_k:
            # The mass that top_p is a share of reaches past what can be drawn.
            log_p = log_distribution(logits, sampling)
            tokens = torch.nonzero(log_p > float("-inf")).squeeze(-1)
            return cls(tokens, log_p[tokens], cut=True)
        stays = torch.ones_like(z, dtype=torch.bool)
        if 0 < top_k < len(tokens):
            stays = z >= torch.topk(z, top_k).values[-1]
        if sampling.top_p < 1.0:
            total = torch.logsumexp(z[stays], 0) if top_k else _log_mass(logits, sampling, top, tokens, z)
            stays[stays.clone()] = _nucleus(z[stays], total, sampling.top_p)
        if sampling.min_p > 0.0:
            stays &= z >= z.max() + math.log(sampling.min_p)
        return cls(tokens[stays], z[stays], cut=not bool(stays.all()))

    def draw(self, seed: int, choice: int, position: int) -> int:
        """argmax(log p + G), lowest id on ties."""
        noisy = self.log_p + gumbel(seed, choice, position, self.tokens)
        return int(self.tokens[noisy.argmax()])

    def allow(self, token: int, logits: Tensor, sampling: Sampling) -> bool:
        """Whether p(token) > 0; logits and sampling as in `of`."""
        if bool((self.tokens == token).any()):
            return True
        return not self.cut and bool(log_distribution(logits, sampling)[token] > float("-inf"))


def log_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """log p [vocab] float64 of A's logits [vocab]: temperature (> 0), top_k, top_p, min_p, renormalised."""
    z = logits.double() / sampling.temperature
    if 0 < sampling.top_k < z.numel():
        z = z.masked_fill(z < torch.topk(z, sampling.top_k).values[-1], float("-inf"))
    if sampling.top_p < 1.0:
        z = z.masked_fill(~_nucleus(z, torch.logsumexp(z, 0), sampling.top_p), float("-inf"))
    if sampling.min_p > 0.0:
        z = z.masked_fill(z < z.max() + math.log(sampling.min_p), float("-inf"))
    return torch.log_softmax(z, dim=-1)


def _log_mass(logits: Tensor, sampling: Sampling, top: float, tokens: Tensor, z: Tensor) -> Tensor:
    """log sum exp of logits [vocab] / temperature, float64; z: the same of the likeliest tokens alone.

    Only those are worth float64: the rest is a small part of the mass, and its rounding a smaller one.
    """
    e = torch.exp((logits - top) / sampling.temperature)
    rest = e.sum(dtype=torch.float64) - e[tokens].sum(dtype=torch.float64)
    most = top / sampling.temperature
    return most + torch.log(torch.exp(z - most).sum() + rest)


def _nucleus(z: Tensor, log_total: Tensor, top_p: float) -> Tensor:
    """Which of z [n] are in the smallest set whose mass reaches top_p: all before which it is still below."""
    sorted_z, order = torch.sort(z, descending=True, stable=True)
    p = torch.exp(sorted_z - log_total)
    within = p.cumsum(-1) - p < top_p
    within[0] = True
    return torch.zeros_like(within).scatter(0, order, within)


def gumbel(seed: int, choice: int, position: int, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise float64 [tokens], a pure function of its arguments; 24-bit uniforms."""
    counter = f"{seed}:{choice}:{position}".encode()
    key = int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "little")
    h = _mix32(tokens ^ (key & _MASK32))
    h = _mix32((h + (key >> 32)) & _MASK32)
    uniform = ((h >> 8).double() + 0.5) / 2**24
    return -torch.log(-torch.log(uniform))


def _mix32(h: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finalizer, on the low halves of int64."""
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & _MASK32
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & _MASK32
    return h ^ (h >> 16)

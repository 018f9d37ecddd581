"""Sampling written down as the contract says it, over all tokens: what the drawing of few is held against."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from gateway.core import Sampling


def log_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """log p [vocab] float64 of A's logits [vocab]: temperature (> 0), top_k, top_p, min_p, renormalised."""
    z = logits.double() / sampling.temperature
    if 0 < sampling.top_k < z.numel():
        z = z.masked_fill(z < torch.topk(z, sampling.top_k).values[-1], -math.inf)
    if sampling.top_p < 1.0:
        ordered, order = torch.sort(z, descending=True, stable=True)
        p = torch.softmax(ordered, -1)
        kept = p.cumsum(-1) - p < sampling.top_p
        kept[0] = True
        z = z.masked_fill(~torch.zeros_like(kept).scatter(0, order, kept), -math.inf)
    if sampling.min_p > 0.0:
        z = z.masked_fill(z < z.max() + math.log(sampling.min_p), -math.inf)
    return torch.log_softmax(z, dim=-1)


def noise(seed: int, choice: int, position: int, tokens: Tensor) -> Tensor:
    """G(seed, choice, position, token), float64, on wide integers."""
    counter = f"{seed}:{choice}:{position}".encode()
    key = int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "little")
    bits = _mix((_mix(tokens ^ (key % 2**32)) + (key >> 32)) % 2**32) >> 8
    return -torch.log(-torch.log((bits.double() + 0.5) / 2**24))


def _mix(h: Tensor) -> Tensor:
    h = h ^ (h >> 16)
    h = h * 0x85EBCA6B % 2**32
    h = h ^ (h >> 13)
    h = h * 0xC2B2AE35 % 2**32
    return h ^ (h >> 16)


def drawn(logits: Tensor, sampling: Sampling, choice: int, position: int) -> int:
    """argmax(log p + G), lowest id on ties."""
    everywhere = noise(sampling.seed, choice, position, torch.arange(len(logits)))
    return int((log_distribution(logits, sampling) + everywhere).argmax())

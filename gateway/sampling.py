"""Logits to tokens and signals, exactly as the contract's "Sampling and acceptance" says.

logits -> penalties, bias, min_tokens = A (softmax at temperature 1) -> temperature, top_k, top_p, min_p,
renormalised = p. A token is argmax(log p + G) with counter-based Gumbel noise G(seed, choice, position,
token) that all models share: where two models' distributions are close they draw the same token, and a
verified draft is "right" simply when it equals the large model's own draw (Gumbel-max coupling; Daliri et al.
2025, arXiv 2408.07978).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gateway.core import Sampling, Signals, TopK

NOISE_RANGE = 20.25
"""Largest difference in nats of two noises whose uniforms have 24 bits: a token further below cannot win."""

_MASK32 = 0xFFFFFFFF


class Constraint(Protocol):
    """A grammar's matcher for one row, moved along token by token and back."""

    def mask(self) -> Tensor:
        """Which tokens may come now: bool [at least the vocabulary]; at least one may (the end counts)."""
        ...

    def advance(self, token: int) -> None:
        """A token was drafted or written."""
        ...

    def rollback(self, num: int) -> None:
        """The last num tokens were dropped."""
        ...


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be read off one row of logits.

    output: the choice's output tokens before this position, drafts included. position: output position.
    draft: a token whose probability is wanted. small_penalty: the routing's small_repetition_penalty.
    banned: token ids that may not come yet (min_tokens). mask: a grammar's allowed tokens, bool [vocab].
    """

    sampling: Sampling
    choice: int
    position: int
    prompt: Sequence[int]
    output: Sequence[int]
    num_topk: int
    draft: int | None = None
    small_penalty: float = 1.0
    banned: tuple[int, ...] = ()
    mask: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether A is the untouched softmax of the logits."""
        shaped = self.sampling.shapes_logits or self.banned or self.small_penalty != 1.0
        return not shaped and self.mask is None


@dataclass(frozen=True, slots=True)
class Reading:
    """What a model says at one position: its own token and p_token = A(token), the signals of A, its top
    tokens, and of the draft asked about: p_draft = A(draft), allowed = p(draft) > 0."""

    token: int
    p_token: float
    signals: Signals
    topk: TopK
    p_draft: float | None = None
    allowed: bool = False


@torch.inference_mode()
def read(logits: Tensor, asks: Sequence[Ask], attn_entropy: Tensor | None = None) -> list[Reading]:
    """One Reading per row of `logits` [rows, vocab] float32; shaped rows are rewritten in place.

    In inference mode because the models' logits are inference tensors, which may only be written there.
    """
    if not asks:
        return []
    for i, ask in enumerate(asks):
        if not ask.plain:
            logits[i] = shape(logits[i], ask)
    k = max(ask.num_topk for ask in asks)
    norm = torch.logsumexp(logits, dim=-1, keepdim=True)
    top = torch.topk(logits, k, dim=-1)
    top_logprobs = top.values - norm
    p = torch.exp(logits - norm)
    top_p = top_logprobs[:, :2].exp()
    drafts = torch.tensor([0 if ask.draft is None else ask.draft for ask in asks], device=logits.device)
    p_draft = p.gather(1, drafts[:, None])
    numbers = torch.cat(
        [top_p[:, :1], top_p[:, :1] - top_p[:, 1:], torch.special.entr(p).sum(-1, keepdim=True), p_draft],
        dim=1,
    ).tolist()
    argmax = logits.argmax(dim=-1).tolist()
    entropies = None if attn_entropy is None else attn_entropy.tolist()
    ids, logprobs = top.indices.tolist(), top_logprobs.tolist()
    readings = []
    for i, ask in enumerate(asks):
        p1, gap, entropy, of_draft = numbers[i]
        token, p_token, allowed = argmax[i], p1, of_draft > 0.0
        if ask.sampling.temperature > 0:
            log_p = log_distribution(logits[i], ask.sampling)
            token = draw(log_p, ask.sampling.seed, ask.choice, ask.position)
            p_token = float(p[i, token])
            allowed = ask.draft is not None and bool(log_p[ask.draft] > float("-inf"))
        readings.append(
            Reading(
                token=token,
                p_token=p_token,
                signals=Signals(p1, gap, entropy, None if entropies is None else entropies[i]),
                topk=TopK(tuple(ids[i][: ask.num_topk]), tuple(logprobs[i][: ask.num_topk])),
                p_draft=None if ask.draft is None else of_draft,
                allowed=ask.draft is not None and allowed,
            )
        )
    return readings


def shape(logits: Tensor, ask: Ask) -> Tensor:
    """One position's logits [vocab] after penalties, bias, bans and grammar.

    Repetition penalty as in CTRL (Keskar 2019): over prompt and output, positive logits divided, negative
    multiplied. Presence and frequency penalties as OpenAI defines them: over the output.
    """
    s = ask.sampling
    out = logits.clone()
    for penalty in (s.repetition_penalty, ask.small_penalty):
        if penalty != 1.0:
            seen = torch.tensor(sorted({*ask.prompt, *ask.output}), device=out.device)
            picked = out[seen]
            out[seen] = torch.where(picked > 0, picked / penalty, picked * penalty)
    if (s.presence_penalty or s.frequency_penalty) and ask.output:
        counts = Counter(ask.output)
        seen = torch.tensor(list(counts), device=out.device)
        often = torch.tensor(list(counts.values()), device=out.device, dtype=out.dtype)
        out[seen] -= s.presence_penalty + s.frequency_penalty * often
    for token, bias in s.logit_bias:
        out[token] += bias
    if ask.banned:
        out[list(ask.banned)] = float("-inf")
    if ask.mask is not None:
        out.masked_fill_(~ask.mask[: out.numel()].to(out.device), float("-inf"))
    return out


def log_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """log p [vocab] float64 of A's logits [vocab]: temperature (> 0), top_k, top_p, min_p, renormalised."""
    z = logits.double() / sampling.temperature
    if 0 < sampling.top_k < z.numel():
        z = z.masked_fill(z < torch.topk(z, sampling.top_k).values[-1], float("-inf"))
    if sampling.top_p < 1.0:
        sorted_z, order = torch.sort(z, descending=True, stable=True)
        p = torch.softmax(sorted_z, dim=-1)
        # The smallest set whose mass reaches top_p: a token stays while the mass before it is below top_p.
        beyond = p.cumsum(-1) - p >= sampling.top_p
        beyond[0] = False
        z = z.masked_fill(torch.zeros_like(beyond).scatter(0, order, beyond), float("-inf"))
    if sampling.min_p > 0.0:
        p = torch.softmax(z, dim=-1)
        z = z.masked_fill(p < sampling.min_p * p.max(), float("-inf"))
    return torch.log_softmax(z, dim=-1)


def draw(log_p: Tensor, seed: int, choice: int, position: int) -> int:
    """argmax(log p + G), lowest id on ties; only tokens that can still win get noise."""
    candidates = torch.nonzero(log_p > log_p.max() - NOISE_RANGE).squeeze(-1)
    noisy = log_p[candidates] + gumbel(seed, choice, position, candidates)
    return int(candidates[noisy.argmax()])


def gumbel(seed: int, choice: int, position: int, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise float64 [tokens], a pure function of its arguments; 24-bit uniforms."""
    counter = f"{seed}:{choice}:{position}".encode()
    key = int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "little")
    h = _mix32(tokens ^ (key & _MASK32))
    h = _mix32((h + (key >> 32)) & _MASK32)
    uniform = ((h >> 8).double() + 0.5) / 2**24
    return -torch.log(-torch.log(uniform))


def uniform(counter: str) -> float:
    """A uniform in [0, 1) with 24 bits, so a float32 holds it; a pure function of `counter`."""
    return (int.from_bytes(hashlib.blake2b(counter.encode(), digest_size=4).digest(), "little") >> 8) / 2**24


def _mix32(h: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finalizer, on the low halves of int64."""
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & _MASK32
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & _MASK32
    return h ^ (h >> 16)

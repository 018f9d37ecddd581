"""Logits to tokens and signals, exactly as the contract's "Sampling and acceptance" says.

logits -> penalties, bias, min_tokens = A (softmax at temperature 1), which the signals are of; a token is
A's most likely one at temperature 0, else drawn (drawing.py).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from msgspec import Struct
from torch import Tensor

from gateway.core import Sampling, Signals, TopK
from gateway.drawing import Draw, draw
from gateway.summary import Summarize, by_torch


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


class Ask(Struct, frozen=True):
    """What is to be read off one row of logits.

    output: the choice's output tokens before this position, drafts included. position: output position.
    draft: a token whose probability is wanted. small_penalty: the routing's small_repetition_penalty.
    banned: token ids that may not come yet (min_tokens). mask: a grammar's allowed tokens, bool [vocab].
    hidden: whether the model's last hidden state is wanted.
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
    hidden: bool = False

    @property
    def plain(self) -> bool:
        """Whether A is the untouched softmax of the logits."""
        shaped = self.sampling.shapes_logits or self.banned or self.small_penalty != 1.0
        return not shaped and self.mask is None


class Reading(Struct, frozen=True):
    """What a model says at one position: its own token and p_token = A(token), the signals of A, its top
    tokens, and of the draft asked about: p_draft = A(draft), allowed = p(draft) > 0."""

    token: int
    p_token: float | None
    signals: Signals
    topk: TopK
    p_draft: float | None = None
    allowed: bool = False


class Numbers(NamedTuple):
    """What a pass says at each of its asks, in numbers on the host.

    values: top1_p, gap, entropy, p_draft, the draft's logit, the largest logit, norm.
    argmax, ids, logprobs: as in Summary.
    attn_entropies, states: a last layer's, a hidden state in float16, where there are any.
    """

    values: list[list[float]]
    argmax: list[int]
    ids: list[list[int]]
    logprobs: list[list[float]]
    attn_entropies: list[float | None]
    states: list[bytes | None]


@torch.inference_mode()
def look(
    logits: Tensor,
    asks: Sequence[Ask],
    attn_entropy: Tensor | None = None,
    hidden: Tensor | None = None,
    summarize: Summarize = by_torch,
) -> Numbers:
    """The last part of a pass: `logits` [rows, vocab] float32, one row an ask, become numbers on the host.

    Shaped rows are rewritten in place; in inference mode because the models' logits are inference tensors,
    which may only be written there. Waits for the device.
    """
    if not asks:
        return Numbers([], [], [], [], [], [])
    for i, ask in enumerate(asks):
        if not ask.plain:
            logits[i] = shape(logits[i], ask)
    said = summarize(logits, max(2, *(ask.num_topk for ask in asks)))
    norm = said.norm[:, None]
    top_logprobs = said.top - norm
    top_p = top_logprobs[:, :2].exp()
    drafts = torch.tensor([0 if ask.draft is None else ask.draft for ask in asks], device=logits.device)
    draft = logits.gather(1, drafts[:, None])
    p1, gap, p_draft = top_p[:, :1], top_p[:, :1] - top_p[:, 1:], (draft - norm).exp()
    values = torch.cat(
        [p1, gap, said.entropy[:, None], p_draft, draft, said.top[:, :1], norm], dim=1
    ).tolist()
    return Numbers(
        values,
        said.argmax.tolist(),
        said.ids.tolist(),
        top_logprobs.tolist(),
        [None] * len(asks) if attn_entropy is None else attn_entropy.tolist(),
        _float16(hidden, [ask.hidden for ask in asks]),
    )


@torch.inference_mode()
def read(logits: Tensor, asks: Sequence[Ask], numbers: Numbers) -> list[Reading]:
    """One Reading an ask, from what `look` made of the same logits; tokens are drawn where that is asked."""
    drawn = _draw(logits, asks, numbers)
    readings = []
    for i, (ask, values, token, ids, logprobs, attn_entropy, state) in enumerate(
        zip(asks, *numbers, strict=True)
    ):
        p1, p_gap, entropy, p_draft = values[:4]
        p_token, allowed = p1, p_draft > 0.0
        if i in drawn:
            token, p_token, allowed = drawn[i]
        readings.append(
            Reading(
                token=token,
                p_token=p_token,
                signals=Signals(p1, p_gap, entropy, attn_entropy, state),
                topk=TopK(tuple(ids[: ask.num_topk]), tuple(logprobs[: ask.num_topk])),
                p_draft=None if ask.draft is None else p_draft,
                allowed=ask.draft is not None and allowed,
            )
        )
    return readings


def _draw(logits: Tensor, asks: Sequence[Ask], numbers: Numbers) -> dict[int, tuple[int, float, bool]]:
    """Of each row with a temperature above 0: the drawn token, p_token, allowed."""
    rows = [i for i, ask in enumerate(asks) if ask.sampling.temperature > 0]
    if not rows:
        return {}
    draws = []
    for i in rows:
        ask, (*_, draft_logit, top, _norm) = asks[i], numbers.values[i]
        best = numbers.argmax[i]
        draws.append(Draw(i, ask.sampling, ask.choice, ask.position, best, top, ask.draft, draft_logit))
    drawn = draw(logits, draws)
    norms = torch.tensor([numbers.values[i][-1] for i in rows], device=logits.device)
    p_tokens = (logits[rows, [d.token for d in drawn]] - norms).exp().tolist()
    return {i: (d.token, p_token, d.allowed) for i, d, p_token in zip(rows, drawn, p_tokens, strict=True)}


def _float16(hidden: Tensor | None, wanted: Sequence[bool]) -> list[bytes | None]:
    """The wanted rows of `hidden` [rows, width] as float16 bytes; what is beyond float16 is its largest."""
    if hidden is None or not any(wanted):
        return [None] * len(wanted)
    limit = torch.finfo(torch.float16).max
    rows = hidden.clamp(-limit, limit).to("cpu", torch.float16).numpy().astype("<f2", copy=False)
    return [row.tobytes() if want else None for row, want in zip(rows, wanted, strict=True)]


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


def uniform(counter: str) -> float:
    """A uniform in [0, 1) with 24 bits, so a float32 holds it; a pure function of `counter`."""
    return (int.from_bytes(hashlib.blake2b(counter.encode(), digest_size=4).digest(), "little") >> 8) / 2**24

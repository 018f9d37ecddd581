"""From the few top logprobs an engine returns to a Reading.

Only the k likeliest tokens are known. The engine's own token and the top of A are exact. A drafted token that
is not among them has an unknown probability, at most 1 / (k + 1): its p_draft is None, and every accept rule
takes that for a rejection. The entropy is unknown (NaN), and so is the probability of a token sampled from
below the k-th where the engine does not name it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gateway.core import Sampling, Signals, TopK
from gateway.engines.query import Malformed
from gateway.policy import f32
from gateway.sampling import Reading

Candidate = tuple[int, float]
"""Token id and logprob of A in nats."""

SLACK = 1e-3
"""Logprobs that are this much above 0 are rounding, not nonsense."""


def reading(
    token: int,
    top: Sequence[Candidate],
    sampling: Sampling,
    num_topk: int,
    vocab_size: int,
    draft: int | None = None,
) -> Reading:
    """What the model says at one position: its own token, the candidates it named, a draft's standing.

    top: any order, `token` and the draft among them where the engine names them; ids at or beyond vocab_size
    (a padded head's) are left out. Raises Malformed.
    """
    if not 0 <= token < vocab_size:
        raise Malformed(f"token id {token} is outside the vocabulary of {vocab_size}")
    named: dict[int, float] = {}
    for other, logprob in top:
        if not isinstance(logprob, int | float) or math.isnan(logprob) or logprob > SLACK:
            raise Malformed(f"token {other} has the logprob {logprob}")
        if 0 <= other < vocab_size:
            named[other] = min(float(logprob), 0.0)
    ranked = sorted(named.items(), key=lambda item: (-item[1], item[0]))
    if len(ranked) < 2:
        raise Malformed("fewer than two top logprobs")
    likeliest = ranked[:num_topk]
    p1, p2 = _p(ranked[0][1]), _p(ranked[1][1])
    known = draft is not None and draft in named
    return Reading(
        token=token,
        p_token=_p(named[token]) if token in named else None,
        signals=Signals(p1, f32(p1 - p2), math.nan),
        topk=TopK(tuple(i for i, _ in likeliest), tuple(f32(logprob) for _, logprob in likeliest)),
        p_draft=_p(named[draft]) if known and draft is not None else None,
        allowed=known and draft is not None and _allowed(draft, ranked, sampling),
    )


def _p(logprob: float) -> float:
    """Its probability, as a float32 value like all that the tape holds."""
    return f32(math.exp(logprob))


def _allowed(draft: int, ranked: Sequence[Candidate], sampling: Sampling) -> bool:
    """Whether p(draft) > 0: top_k and min_p keep it (top_p needs the whole distribution: refused before)."""
    logprobs = dict(ranked)
    if logprobs[draft] == -math.inf:
        return False
    if sampling.temperature == 0:
        return True
    rank = sum(logprob > logprobs[draft] for _, logprob in ranked)
    if 0 < sampling.top_k <= rank:
        return False
    share = (logprobs[draft] - ranked[0][1]) / sampling.temperature
    return sampling.min_p == 0 or share >= math.log(sampling.min_p)

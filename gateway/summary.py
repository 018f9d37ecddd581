"""What a router needs of logits, in as few readings of them as can be: top tokens, norm and entropy.

The vocabulary is wide: five torch operators over it cost more than the small model's head. On the CPU kernels
it is one pass for the top tokens and one for both sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Summary(NamedTuple):
    """Of each row of logits, [rows, k] or [rows]: the k largest (ids int64, top float32), largest first; the
    lowest id among the largest (argmax int64); norm = log sum exp; entropy of the softmax in nats.
    """

    ids: Tensor
    top: Tensor
    argmax: Tensor
    norm: Tensor
    entropy: Tensor


Summarize = Callable[[Tensor, int], Summary]
"""From logits float32 [rows, vocab] and k; a row's Summary does not depend on the others."""


def by_torch(logits: Tensor, k: int) -> Summary:
    """On any device."""
    norm = torch.logsumexp(logits, dim=-1)
    top = torch.topk(logits, k, dim=-1)
    p = torch.exp(logits - norm[:, None])
    entropy = torch.special.entr(p).sum(-1)
    return Summary(top.indices, top.values, logits.argmax(dim=-1), norm, entropy)


def by_kernels(logits: Tensor, k: int) -> Summary:
    """On the CPU kernels, which must have been loaded; ties come in the order of their ids."""
    ids, top, norm, entropy = torch.ops.tokentape.summarize(logits, k)
    return Summary(ids, top, ids[:, 0], norm, entropy)

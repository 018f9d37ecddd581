"""The accept rules: does a drafted token stand, given what the large model says at its position?

x is the draft, y the large model's own token (same noise). Pure functions of one position.
Lossy rules: token_v3 is speculative cascades' token-specific rule 3 (arXiv 2405.19261), typical is Medusa's
typical acceptance (arXiv 2401.10774).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gateway.core import Accept
from gateway.policy import Policy
from gateway.sampling import Reading

TYPICAL_EPSILON = 0.09
TYPICAL_DELTA = 0.3


def accepts(policy: Policy, draft: int, large: Reading) -> bool:
    """Whether `draft` stands where the large model read `large`.

    Under `trust` only looked-up tokens are asked about, and they must be the large model's own.
    """
    if draft == large.token:
        return True
    if policy.accept in (Accept.EXACT, Accept.TRUST) or not large.allowed or large.p_draft is None:
        return False
    if policy.accept is Accept.THRESHOLD:
        return large.p_draft >= policy.accept_threshold
    if policy.accept is Accept.TOKEN_V3:
        return large.p_draft >= (1 - policy.alpha) * large.signals.top1_p
    if policy.accept is Accept.TYPICAL:
        floor = min(TYPICAL_EPSILON, TYPICAL_DELTA * math.exp(-large.signals.entropy))
        return large.p_draft >= floor
    raise ValueError(f"accept rule {policy.accept} does not verify drafts")


def num_accepted(policy: Policy, drafts: Sequence[int], large: Sequence[Reading]) -> int:
    """Length of the accepted prefix of `drafts`; `large` has a reading for each."""
    for i, (draft, reading) in enumerate(zip(drafts, large, strict=False)):
        if not accepts(policy, draft, reading):
            return i
    return len(drafts)

"""What a threshold would do, read off answers that the large model wrote alone (mode `shadow`).

An estimate: the text is the large model's, so a kept wrong token's consequences are not in it. The guarantee
comes from running the policy (calibrate.py); the curve says where to try.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gateway.core import Mode, Reason, Tier
from gateway.load import CostTable
from gateway.policy import Policy, State, f32, score
from gateway.tuning.run import Answer

Costs = Mapping[Tier, CostTable]

GRID = (*(round(i / 50, 2) for i in range(50)), 0.99, 0.999)
"""Thresholds of the drawn curve."""

CLIFF_STEP = 0.02
"""Least share of output tokens between neighbouring points when the cliff is looked for."""


@dataclass(frozen=True, slots=True)
class Track:
    """One answer's output positions. score: the routing score (nan where the small model said nothing).

    agrees: the small model's own token is the large model's. free: the rules before the score let the small
    model decide here. fact: the proposal looks like part of a fact.
    """

    score: np.ndarray
    agrees: np.ndarray
    free: np.ndarray
    fact: np.ndarray


@dataclass(frozen=True, slots=True)
class Point:
    """One threshold. Shares are of all output tokens; agreement is of the kept ones (1 where none is).

    tokens_per_s, speed: predicted from pass times, one request at a time; speed is over large-only.
    """

    threshold: float
    kept: float
    agreement: float
    disagreement: float
    tokens_per_s: float
    speed: float


def track(answer: Answer, policy: Policy) -> Track:
    """The positions of a shadow answer, scored anew under `policy`."""
    columns, rows = answer.columns, answer.written
    scores, agrees, free = [], [], []
    routed = policy.mode is not Mode.LARGE_ONLY
    for i in rows:
        signals = answer.signals(i)
        if signals is None:
            scores.append(np.nan)
        else:
            state = State(
                columns["idx"][i], 0, 1, columns["run_length"][i], 0.0, columns["ema_acceptance"][i], 0
            )
            scores.append(score(policy, state, signals))
        agrees.append(columns["small_choice"][i] == columns["large_choice"][i])
        guarded = columns["reason"][i] == Reason.LOOP_GUARD
        free.append(routed and columns["idx"][i] >= policy.protect_first and not guarded)
    fact = np.array([bool(columns["fact_value"][i]) for i in rows], dtype=bool)
    free_now = np.array(free, dtype=bool) & ~(fact if policy.fact_guard else np.zeros_like(fact))
    return Track(np.array(scores), np.array(agrees, dtype=bool), free_now, fact)


def keeps(one: Track, threshold: float) -> np.ndarray:
    """bool [positions]: where the small model's token would be kept."""
    return np.asarray(one.free & (one.score >= f32(threshold)))


def point(tracks: Sequence[Track], policy: Policy, threshold: float, costs: Costs) -> Point:
    """The curve at one threshold."""
    total = sum(len(one.score) for one in tracks)
    kept = right = 0
    routed_ms = 0.0
    for one in tracks:
        keep = keeps(one, threshold)
        kept += int(keep.sum())
        right += int((keep & one.agrees).sum())
        routed_ms += predicted_ms(keep, one.agrees, policy, costs)
    alone_ms = total * costs[Tier.LARGE](1)
    return Point(
        threshold,
        kept / total,
        right / kept if kept else 1.0,
        (kept - right) / total,
        1e3 * total / routed_ms,
        alone_ms / routed_ms,
    )


def draw(tracks: Sequence[Track], policy: Policy, costs: Costs) -> list[Point]:
    """The curve over GRID, thresholds rising."""
    return [point(tracks, policy, threshold, costs) for threshold in GRID]


def predicted_ms(keep: np.ndarray, agrees: np.ndarray, policy: Policy, costs: Costs) -> float:
    """Model time of one answer decoded alone, by the decode loop's rounds on the recorded path."""
    small, large = costs[Tier.SMALL], costs[Tier.LARGE]
    n, i, ms, behind = len(keep), 0, 0.0, 1
    protected = min(policy.protect_first, n)
    ms += protected * large(1)
    i, behind = protected, protected + 1
    limit = policy.draft_length if policy.verified else n
    while i < n:
        drafts = 0
        # The small model reads what the large one wrote, then drafts until it defers, errs or is full.
        while i + drafts < n and drafts < min(limit, policy.max_small_run):
            ms += small(behind)
            behind = 1
            if not keep[i + drafts]:
                break
            drafts += 1
        stand = drafts
        if policy.verified:
            wrong = np.flatnonzero(~agrees[i : i + drafts])
            stand = int(wrong[0]) if wrong.size else drafts
        ms += large(drafts + 1)
        i += stand + 1
        behind = 2 if stand == drafts and drafts == limit else 1
    return ms


def best_draft_length(
    tracks: Sequence[Track], policy: Policy, threshold: float, costs: Costs, most: int = 12
) -> int:
    """The draft length with the highest predicted speed at a threshold; the policy's own under `trust`."""
    if not policy.verified:
        return policy.draft_length
    speeds = {
        k: point(tracks, replace(policy, draft_length=k), threshold, costs).speed for k in range(1, most + 1)
    }
    return max(speeds, key=lambda k: speeds[k])


def cliff(points: Sequence[Point]) -> Point | None:
    """Where quality falls off: the knee of agreement over kept share (Kneedle; Satopaa et al. 2011).

    The point furthest above the chord from the strictest to the loosest threshold; None for a flat curve.
    """
    path = [points[-1]]
    for one in reversed(points):
        if one.kept - path[-1].kept >= CLIFF_STEP:
            path.append(one)
    if len(path) < 3 or path[0].agreement <= path[-1].agreement:
        return None
    first, last = path[0], path[-1]
    slope = (last.agreement - first.agreement) / (last.kept - first.kept)
    height = [one.agreement - (first.agreement + slope * (one.kept - first.kept)) for one in path]
    best = int(np.argmax(height))
    return path[best] if height[best] > 0 else None


def losses(tracks: Sequence[Track], threshold: float) -> np.ndarray:
    """Estimated disagreement of each answer at a threshold: [answers]."""
    return np.array([(keeps(one, threshold) & ~one.agrees).mean() for one in tracks])

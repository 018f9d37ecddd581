"""From prompts to a policy with a guarantee: curve on some prompts, the policy really run on the others."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gateway.config import Calibration, ConfigError
from gateway.core import Accept, Mode, Tier
from gateway.policy import Policy, admitted
from gateway.progress import say
from gateway.request import Served
from gateway.tuning import curve, learn
from gateway.tuning.guarantee import Chosen, fewest_prompts, fixed_sequence, likely_prompts
from gateway.tuning.judge import Examples
from gateway.tuning.prompts import Prompt
from gateway.tuning.run import Answer, Runner, disagreement
from gateway.tuning.saved import Saved

TUNE_SHARE, TRAIN_SHARE = 0.2, 0.25
"""Shares of the prompts that the curve, and a learned router, are made from."""

FEWEST_TUNED = 8
"""Prompts without which a curve says nothing."""

LEAST_STEP = 0.05
"""Between thresholds that are run for real beyond those the curve speaks for."""


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked for: mean disagreement at most `bound`, with this confidence."""

    bound: float
    confidence: float

    @property
    def delta(self) -> float:
        """The chance of being wrong."""
        return 1 - self.confidence


@dataclass(frozen=True, slots=True)
class Split:
    """Prompts apart by purpose; which is which hangs on their hashes alone."""

    train: list[Prompt]
    tune: list[Prompt]
    held: list[Prompt]


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The outcome. policy: with the chosen threshold (None: none qualifies). measured: held-out answers by
    threshold. facts: what the fact guard would have caught and cost at the chosen or strictest threshold."""

    split: Split
    base: Policy
    points: list[curve.Point]
    cliff: curve.Point | None
    chosen: Chosen
    policy: Policy | None
    measured: dict[float, list[Answer]]
    learned: learn.Learned | None
    facts: Facts


@dataclass(frozen=True, slots=True)
class Facts:
    """On the tuning prompts at one threshold: kept positions, those that look like facts, and how many of
    both are wrong (confidently, since kept)."""

    kept: int
    wrong: int
    facts_kept: int
    facts_wrong: int


def split(prompts: Sequence[Prompt], learns: bool, target: Target) -> Split:
    """Part the prompts; raises ConfigError, saying how many are needed, where too few are left to test on."""
    order = sorted(prompts, key=lambda prompt: prompt.digest)
    num_train = round(TRAIN_SHARE * len(order)) if learns else 0
    num_tune = max(FEWEST_TUNED, round(TUNE_SHARE * len(order)))
    held = order[num_train + num_tune :]
    needed = fewest_prompts(target.bound, target.delta)
    if len(held) < needed:
        share = 1 - TUNE_SHARE - (TRAIN_SHARE if learns else 0)
        total = max(round(needed / share) + 1, needed + FEWEST_TUNED)
        raise ConfigError(
            f"--prompts: {len(prompts)} prompts leave {max(0, len(held))} to test on; a bound of "
            f"{target.bound:g} at confidence {target.confidence:g} needs at least {needed} even if no token "
            f"disagrees: bring {total} or more (two or three times as many are realistic)"
        )
    return Split(order[:num_train], order[num_train : num_train + num_tune], held)


def calibrate(
    runner: Runner,
    saved: Saved,
    parts: Split,
    base: Policy,
    target: Target,
    costs: curve.Costs,
    *,
    learns: bool = False,
    hidden: bool = False,
    more_examples: Examples | None = None,
) -> Calibrated:
    """Draw the curve, choose candidates on the tuning prompts, run them on the held-out ones, test.

    learns: train routers first; hidden: also such as read the small model's hidden state.
    """
    watched = replace(runner, keeps_hidden=hidden)
    shadow = replace(base, mode=Mode.SHADOW)
    learned = None
    if learns:
        trained = saved.run(watched, parts.train, shadow, "large model, prompts to learn from")
    tuned = saved.run(watched, parts.tune, shadow, "large model, prompts for the curve")
    if learns:
        training = learn.examples(trained, base.protect_first, base.max_small_run)
        if more_examples is not None and len(more_examples):
            training = learn.join([training, more_examples])
        held = learn.examples(tuned, base.protect_first, base.max_small_run)
        learned = learn.learn(training, held, say)
        if learned.router is not None:
            base = replace(base, router=learned.router)
    tracks = [
        curve.track(answer, admitted(base, prompt.detected, runner.max_tokens))
        for prompt, answer in zip(parts.tune, tuned, strict=True)
    ]
    points = curve.draw(tracks, base, costs)
    tried = candidates(tracks, target, len(parts.held))
    base = replace(base, draft_length=curve.best_draft_length(tracks, base, tried[-1], costs))
    points = curve.draw(tracks, base, costs)
    measured: dict[float, list[Answer]] = {}

    def losses_at(threshold: float) -> list[float]:
        policy = replace(base, threshold=threshold)
        label = f"threshold {threshold:g}, run for real"
        measured[threshold] = saved.run(runner, parts.held, policy, label)
        return [disagreement(answer, policy) for answer in measured[threshold]]

    chosen = fixed_sequence([*tried, *looser(tried[-1])], losses_at, target.bound, target.delta)
    policy = None if chosen.threshold is None else replace(base, threshold=chosen.threshold)
    at = tried[0] if chosen.threshold is None else chosen.threshold
    return Calibrated(
        parts, base, points, curve.cliff(points), chosen, policy, measured, learned, facts(tracks, at)
    )


def candidates(tracks: Sequence[curve.Track], target: Target, num_held: int) -> list[float]:
    """Thresholds to run for real, strictest first: the loosest that a part of the held-out prompts will
    likely do for, and a few more than there are; the strictest of all where none is likely to pass."""
    least = fewest_prompts(target.bound, target.delta)
    needed: dict[float, int] = {}
    for threshold in curve.GRID:
        loss = curve.losses(tracks, threshold)
        spread = float(loss.std())
        needed[threshold] = likely_prompts(target.bound, target.delta, float(loss.mean()), spread)
    found = set()
    for share in (0.2, 0.6, 1.0, 1.3):
        enough = least + share * (num_held - least)
        fitting = [threshold for threshold, num in needed.items() if 0 < num <= max(enough, least + 1)]
        if fitting:
            found.add(min(fitting))
    return sorted(found, reverse=True) or [curve.GRID[-1]]


def looser(threshold: float) -> list[float]:
    """Tenths below a threshold, down to 0. What is really written often disagrees less than the curve says,
    since limits, riders and lookups leave more to the large model. None is run before all above have passed.
    """
    return [tenth / 10 for tenth in range(9, -1, -1) if tenth / 10 <= threshold - LEAST_STEP]


def facts(tracks: Sequence[curve.Track], threshold: float) -> Facts:
    """What the fact guard would catch at a threshold."""
    kept = wrong = facts_kept = facts_wrong = 0
    for one in tracks:
        keep = curve.keeps(one, threshold)
        kept += int(keep.sum())
        wrong += int((keep & ~one.agrees).sum())
        facts_kept += int((keep & one.fact).sum())
        facts_wrong += int((keep & one.fact & ~one.agrees).sum())
    return Facts(kept, wrong, facts_kept, facts_wrong)


def certificate(done: Calibrated, served: Served, target: Target, prompts_sha256: str) -> Calibration:
    """What the policy file says of the guarantee; only where a threshold was chosen."""
    if done.policy is None:
        raise ValueError("no threshold qualifies, so there is nothing to certify")
    verdict = dict(done.chosen.verdicts)[done.policy.threshold]
    return Calibration(
        small_hash=served.small_hash,
        large_hash=served.large_hash,
        policy_hash=done.policy.hash,
        numerics=served.numerics,
        max_disagreement=target.bound,
        confidence=target.confidence,
        observed=verdict.mean,
        prompts=verdict.num_prompts,
        prompts_sha256=prompts_sha256,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )


def shares(answers: Sequence[Answer]) -> dict[Tier, float]:
    """Share of the output tokens by tier, and nothing where there are none."""
    counts = {tier: sum(answer.count(tier) for answer in answers) for tier in Tier}
    total = sum(counts.values())
    return {tier: count / total for tier, count in counts.items()} if total else {}


def default_policy(accept: Accept | None, stable: Policy | None) -> Policy:
    """What is calibrated: the config's stable policy where there is one, else the defaults under `trust`."""
    if stable is None:
        return Policy(accept=accept or Accept.TRUST)
    return stable if accept is None else replace(stable, accept=accept)


def report_paths(out: Path) -> tuple[Path, Path, Path]:
    """Where the HTML, the PNG and the finished prompts go, beside --out."""
    return out.with_suffix(".html"), out.with_suffix(".png"), out.with_suffix(".progress.jsonl")

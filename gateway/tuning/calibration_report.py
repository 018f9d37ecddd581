"""What `tokentape calibrate` shows: lines for the terminal and sections for the HTML report."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gateway.core import Tier
from gateway.policy import Policy
from gateway.tuning.calibrate import Calibrated, Target, shares
from gateway.tuning.curve import Point
from gateway.tuning.guarantee import likely_prompts
from gateway.tuning.judge import TARGETS
from gateway.tuning.report import Measured, Section, curve_png, inline
from gateway.tuning.run import disagreement

SHOWN = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 0.99, 0.999)
"""Thresholds of the curve that a table shows."""


def measured(done: Calibrated) -> list[Measured]:
    """The thresholds that were really run."""
    return [Measured(t, v.mean, v.num_prompts, v.passed) for t, v in done.chosen.verdicts]


def png(done: Calibrated, target: Target) -> bytes:
    """The curve as a picture."""
    return curve_png(done.points, done.cliff, measured(done), target.bound, done.chosen.threshold)


def verdict(done: Calibrated, target: Target) -> str:
    """The outcome in one sentence."""
    asked = f"mean disagreement at most {target.bound:.2%} with confidence {target.confidence:.0%}"
    if done.policy is None:
        return f"No threshold qualifies: {asked} could not be shown. {_wanted(done, target)}"
    last = dict(done.chosen.verdicts)[done.policy.threshold]
    return (
        f"Threshold {done.policy.threshold:g} qualifies: {asked}; "
        f"{last.mean:.2%} observed on {last.num_prompts} held-out prompts."
    )


def _wanted(done: Calibrated, target: Target) -> str:
    """How many prompts the strictest threshold would likely need."""
    threshold = done.chosen.verdicts[0][0]
    policy = replace(done.base, threshold=threshold)
    losses = np.array([disagreement(answer, policy) for answer in done.measured[threshold]])
    mean, spread = float(losses.mean()), float(losses.std())
    needed = likely_prompts(target.bound, target.delta, mean, spread)
    if not needed:
        return f"At the strictest threshold tried, {threshold:g}, {mean:.2%} were observed."
    share = len(done.split.held) / sum(map(len, (done.split.train, done.split.tune, done.split.held)))
    return (
        f"At threshold {threshold:g} {mean:.2%} were observed on {len(losses)} prompts; to show it takes "
        f"about {needed} to test on, {round(needed / share)} in all."
    )


def sections(done: Calibrated, target: Target, about: tuple[str, ...]) -> list[Section]:
    """The whole report."""
    parts = done.split
    found = [
        Section("Verdict", (verdict(done, target), *about)),
        Section(
            "The curve",
            (
                f"Estimated on {len(parts.tune)} prompts that the large model wrote alone. Kept share and "
                "disagreement are of all output tokens, agreement is of the kept ones; speed is predicted "
                "from pass times measured on this machine, one request at a time.",
                _cliff(done.cliff),
            ),
            image=inline(png(done, target)),
        ),
        Section("Curve, in numbers", (), *_curve_table(done.points)),
        Section(
            "Run for real",
            (
                f"The policy wrote {len(parts.held)} other prompts at each threshold, strictest first, and "
                "the large model was asked about every token it had not written. A threshold passes when the "
                f"wealth of a bet against “the mean is {target.bound:.2%} or more” reaches "
                f"{1 / target.delta:g}; the first that does not pass ends the search.",
                _counted(done.base),
            ),
            *_real_table(done),
        ),
        Section("Facts", (_facts(done),)),
    ]
    if done.learned is not None:
        found.append(_learned(done))
    return found


def table_lines(done: Calibrated) -> list[str]:
    """The curve and the real runs as text columns."""
    lines = []
    for header, rows in (_curve_table(done.points), _real_table(done)):
        widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
        for row in (header, *rows):
            lines.append("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
        lines.append("")
    return lines


Table = tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]


def _curve_table(points: list[Point]) -> Table:
    rows = tuple(
        (
            f"{p.threshold:g}",
            f"{p.kept:.1%}",
            f"{p.agreement:.2%}",
            f"{p.disagreement:.2%}",
            f"{p.tokens_per_s:.1f}",
            f"{p.speed:.2f}x",
        )
        for p in points
        if p.threshold in SHOWN
    )
    return ("threshold", "kept", "agreement", "disagreement", "tokens/s (predicted)", "speed"), rows


def _real_table(done: Calibrated) -> Table:
    rows = []
    for threshold, v in done.chosen.verdicts:
        share = shares(done.measured[threshold])
        rows.append(
            (
                f"{threshold:g}",
                str(v.num_prompts),
                f"{v.mean:.3%}",
                *(f"{share.get(tier, 0.0):.1%}" for tier in (Tier.SMALL, Tier.LOOKUP, Tier.LARGE)),
                f"{v.wealth:.3g}",
                "passed" if v.passed else "not shown",
            )
        )
    header = ("threshold", "prompts", "disagreement", "small", "lookup", "large", "wealth", "verdict")
    return header, tuple(rows)


def _cliff(point: Point | None) -> str:
    if point is None:
        return "There is no quality cliff: agreement does not fall faster anywhere than on the whole."
    return (
        f"The quality cliff is at threshold {point.threshold:g}: down to there {point.kept:.0%} of tokens "
        f"are kept at {point.agreement:.2%} agreement; below it each further token costs more."
    )


def _counted(policy: Policy) -> str:
    if policy.verified and policy.accept == "exact":
        return "Under `exact` no answer differs; what is bounded are rejected proposals."
    return "Counted are served tokens that the large model neither wrote nor would have written."


def _facts(done: Calibrated) -> str:
    f = done.facts
    state = "on" if done.base.fact_guard else "off"
    return (
        f"The fact guard is {state}. Of {f.kept} tokens kept on the curve's prompts {f.wrong} are "
        f"confidently wrong; {f.facts_kept} of the kept look like parts of facts, {f.facts_wrong} of these "
        "are wrong, which is what the guard would catch and what it would cost."
    )


def _learned(done: Calibrated) -> Section:
    learned = done.learned
    assert learned is not None
    said = (
        f"The {learned.kind} router keeps more than the plain gap at equal agreement, and is used."
        if learned.router is not None
        else "No learned router keeps more than the plain gap at equal agreement: the gap is used."
    )
    rows = []
    for one in learned.judged:
        gain = "" if one.gain is None else f"{one.gain.mean:+.1%} [{one.gain.low:+.1%}, {one.gain.high:+.1%}]"
        kept = (f"{one.kept[t]:.1%}" for t in TARGETS)
        rows.append((one.name, f"{one.auroc:.4f}", f"{one.calibration_error:.3f}", *kept, gain))
    header = (
        "rule", "AUROC", "calibration error", *(f"kept at {t:.1%}" for t in TARGETS), "gain at 99.0%",
    )  # fmt: skip
    how = f"Trained on {len(done.split.train)} prompts, judged on the {len(done.split.tune)} of the curve."
    return Section("Learned router", (said, how), header, tuple(rows))

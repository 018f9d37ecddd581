"""A self-contained HTML report: headings, sentences, tables and plots; and the plots as PNG."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jinja2
import matplotlib as mpl

from gateway.tuning.curve import Point

SMALL, LARGE, BOUND = "#1b6ca8", "#c8553d", "#555555"


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a report. image: PNG as base64, or empty."""

    heading: str
    lines: tuple[str, ...] = ()
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    image: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """A threshold at which the policy was really run: mean disagreement, prompts, whether it passed."""

    threshold: float
    disagreement: float
    num_prompts: int
    passed: bool


def html(title: str, sections: Sequence[Section]) -> str:
    """The report; needs nothing beside it."""
    template = resources.files("gateway.tuning").joinpath("report.html.jinja").read_text(encoding="utf-8")
    return (
        jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
        .from_string(template)
        .render(title=title, sections=sections)
    )


def inline(png: bytes) -> str:
    """A PNG as it stands in a report."""
    return base64.b64encode(png).decode()


def curve_png(
    points: Sequence[Point],
    cliff: Point | None,
    measured: Sequence[Measured],
    bound: float,
    chosen: float | None,
) -> bytes:
    """The curve: kept share and agreement over the threshold; disagreement over predicted speed."""
    figure, (left, right) = _figure(2)
    thresholds = [p.threshold for p in points]
    left.plot(thresholds, [p.kept for p in points], color=SMALL, label="kept share")
    left.plot(thresholds, [p.agreement for p in points], color=LARGE, label="agreement of kept tokens")
    if cliff is not None:
        left.axvline(cliff.threshold, color=BOUND, linestyle=":", label=f"quality cliff, {cliff.threshold:g}")
    if chosen is not None:
        left.axvline(chosen, color="black", linewidth=1, label=f"chosen, {chosen:g}")
    left.set(xlabel="threshold", ylim=(0, 1.02), title="What a threshold keeps")
    left.legend(loc="lower left", fontsize=8)
    right.plot(
        [p.speed for p in points], [100 * p.disagreement for p in points], color=SMALL, label="estimated"
    )
    by_threshold = {p.threshold: p for p in points}
    for one in measured:
        speed = by_threshold[one.threshold].speed if one.threshold in by_threshold else None
        if speed is not None:
            marker = "o" if one.passed else "x"
            right.plot([speed], [100 * one.disagreement], marker, color="black")
            at = (speed, 100 * one.disagreement)
            right.annotate(f"{one.threshold:g}", at, (6, -10), textcoords="offset points", fontsize=8)
    right.axhline(100 * bound, color=LARGE, linestyle="--", label=f"bound, {100 * bound:g} %")
    right.set(xlabel="predicted speed over large-only", ylabel="disagreement, % of tokens")
    right.set_title("Quality against speed (o passed, x not shown; run for real)")
    right.legend(loc="upper left", fontsize=8)
    return _png(figure)


def bars_png(title: str, names: Sequence[str], means: Sequence[float], unit: str) -> bytes:
    """One bar a policy."""
    figure, (axes,) = _figure(1)
    axes.bar(list(names), list(means), color=SMALL)
    axes.set(title=title, ylabel=unit)
    return _png(figure)


def _figure(columns: int) -> tuple[Any, Sequence[Any]]:
    # Agg draws without a display; pyplot's global state is not needed.
    mpl.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * columns, 4.0), dpi=120, layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(alpha=0.25)
    return figure, axes


def _png(figure: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()

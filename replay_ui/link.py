"""The permalink: the whole view of a trace as query parameters, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

COLOURS = ("route", "gap", "entropy", "acceptance", "latency", "p_large")

WHAT_IF: dict[str, type] = {
    "threshold": float,
    "protect_first": int,
    "max_small_run": int,
    "draft_length": int,
}
"""The settings that what-if varies, in the order shown."""


@dataclass(frozen=True)
class View:
    """What Replay shows. step: output index. draft: seq of an unwritten row at it, when one is selected.

    zoom: first and last position of the plot's brush, or None.
    """

    trace: str = ""
    choice: int = 0
    step: int = 0
    draft: int | None = None
    colour: str = "route"
    drafts: bool = False
    find: str = ""
    zoom: tuple[int, int] | None = None
    what_if: Mapping[str, float | int] = field(default_factory=dict)

    def query(self) -> str:
        """The query string that restores this view; defaults are left out."""
        pairs: list[tuple[str, str]] = [("trace", self.trace)]
        if self.choice:
            pairs.append(("choice", str(self.choice)))
        pairs.append(("step", str(self.step)))
        if self.draft is not None:
            pairs.append(("draft", str(self.draft)))
        if self.colour != "route":
            pairs.append(("colour", self.colour))
        if self.drafts:
            pairs.append(("drafts", "1"))
        if self.find:
            pairs.append(("find", self.find))
        if self.zoom:
            pairs.append(("zoom", f"{self.zoom[0]}-{self.zoom[1]}"))
        pairs += [(name, f"{value:g}") for name, value in sorted(self.what_if.items())]
        return urlencode(pairs)


def read(query: Mapping[str, Any]) -> View:
    """The view a query string asks for; what makes no sense in it is taken as not said."""

    def text(name: str) -> str:
        return str(query.get(name, ""))

    colour = text("colour")
    what_if: dict[str, float | int] = {}
    for name, kind in WHAT_IF.items():
        value = _number(text(name), kind)
        if value is not None:
            what_if[name] = value
    first, _, last = text("zoom").partition("-")
    low, high = _number(first, int), _number(last, int)
    draft = _number(text("draft"), int)
    return View(
        trace=text("trace"),
        choice=int(_number(text("choice"), int) or 0),
        step=int(_number(text("step"), int) or 0),
        draft=None if draft is None else int(draft),
        colour=colour if colour in COLOURS else "route",
        drafts=text("drafts") == "1",
        find=text("find"),
        zoom=(int(low), int(high)) if low is not None and high is not None and low < high else None,
        what_if=what_if,
    )


def _number(text: str, kind: type) -> float | int | None:
    try:
        value = float(kind(text))
    except (ValueError, OverflowError):
        return None
    if not 0 <= value < 1e9:
        return None
    return int(value) if kind is int else value

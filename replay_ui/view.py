"""Rows of the tape -> what the pages say: sentences, numbers with units, and escaped HTML. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, tzinfo
from html import escape
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from replay_ui.pieces import CLOSE, OPEN, visible
from replay_ui.steps import UNWRITTEN, Steps

DASH = "\u2013"


def share(value: float | None) -> str:
    """A ratio as a percentage."""
    return DASH if value is None else f"{value * 100:.0f} %"


def number(value: float | None, digits: int = 2) -> str:
    """A number, or a dash."""
    return DASH if value is None or math.isnan(value) else f"{value:.{digits}f}"


def duration(seconds: float | None) -> str:
    """A duration in the unit that suits it."""
    if seconds is None:
        return DASH
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def zone(name: str | None) -> tzinfo:
    """The reader's time zone; UTC where the browser does not say."""
    try:
        return ZoneInfo(name) if name else UTC
    except (ZoneInfoNotFoundError, ValueError):
        return UTC


def clock(ts: float | None, tz: tzinfo, date: bool = True) -> str:
    """A Unix time in the reader's zone."""
    if ts is None:
        return DASH
    return datetime.fromtimestamp(ts, tz).strftime("%b %d %H:%M:%S" if date else "%H:%M:%S")


def utc(ts: float | None) -> str:
    """The same in UTC, for hovering."""
    return "" if ts is None else datetime.fromtimestamp(ts, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def markup(shown: str) -> str:
    """Marked text (pieces.py) as HTML: everything escaped, symbols muted."""
    return escape(shown).replace(OPEN, "<i>").replace(CLOSE, "</i>")


def inert(text: str, limit: int = 200) -> str:
    """Any text as HTML with its controls and direction marks drawn as symbols."""
    return markup(visible(text, limit))


def dim(text: str) -> str:
    """A line of muted text; text is HTML."""
    return f'<div class="tt-dim">{text}</div>'


def tile(name: str, value: str) -> str:
    """One number with its name; both are HTML."""
    return f"<div><small>{name}</small><b>{value}</b></div>"


def evidence(name: str, side: str, toward: float, said: str) -> str:
    """One line of evidence, filled as far as it has come; name is HTML, side is `against` or `for`."""
    bar = f'<span class="{side}"><u style="width:{toward * 100:.0f}%"></u></span>'
    return f"<div>{name}</div>{bar}<b>{escape(said)}</b>"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], marked: Sequence[bool] = ()) -> str:
    """A table of HTML cells; marked rows stand out."""
    marks = marked or [False] * len(rows)
    lines = "".join(
        f"<tr{' class=tt-differs' if mark else ''}>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>"
        for row, mark in zip(rows, marks, strict=True)
    )
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f'<table class="tt-table"><tr>{head}</tr>{lines}</table>'


def when(ts: float | None, tz: tzinfo) -> str:
    """A local time with UTC to hover, as HTML."""
    return f'<span title="{utc(ts)}">{clock(ts, tz)}</span>'


def small_share(summary: Mapping[str, Any]) -> float | None:
    """Share of the output that the large model did not write."""
    total = summary.get("completion_tokens")
    return 1 - summary["large_tokens"] / total if total else None


def took(summary: Mapping[str, Any]) -> float | None:
    """Seconds from receipt to the last token."""
    start, end = summary.get("received"), summary.get("finished")
    return end - start if start is not None and end is not None else None


def setting(summary: Mapping[str, Any], name: str) -> Any:
    """One setting of the policy a trace ran under."""
    policy = summary.get("policy")
    return policy.get(name) if isinstance(policy, Mapping) else None


def header(summary: Mapping[str, Any], tz: tzinfo, brief: bool = False) -> str:
    """The first line of Replay; brief leaves out how the answer ended and when it began."""
    policy = f"{summary.get('policy_name') or '?'}@{str(summary.get('policy_hash') or '')[:4]}"
    facts = [
        ("arm / policy", f"{summary.get('arm') or '?'} / {policy}"),
        ("accept rule", str(setting(summary, "accept") or "?")),
        ("what the prompt asks for", str(summary.get("kind") or "?")),
        ("output", f"{summary.get('completion_tokens') or 0} tok"),
        ("not written by the large model", f"{share(small_share(summary))} small"),
        ("drafts the large model let stand", f"acc {number(summary.get('draft_acceptance_rate'))}"),
        ("from receipt to the last token", duration(took(summary))),
        ("why it ended", str(summary.get("finish_reason") or "running")),
        (utc(summary.get("received")), clock(summary.get("received"), tz)),
    ]
    shown = facts[:-2] if brief else facts
    cells = "".join(f'<span title="{escape(title)}">{escape(text)}</span>' for title, text in shown)
    trace = str(summary.get("id") or summary.get("request_id") or "")
    parent = summary.get("parent")
    if parent:
        cells += f"<span>forked from {inert(str(parent), 40)} at step {summary.get('forked_at')}</span>"
    return f'<div class="tt-head"><b title="{escape(trace)}">{inert(trace, 40)}</b>{cells}</div>'


def warnings(summary: Mapping[str, Any], steps: Steps) -> list[str]:
    """What the reader must know before trusting the page."""
    said = []
    if summary.get("finish_reason") is None and not summary.get("interrupted"):
        said.append("This answer is still being written; reload the page for more of it.")
    if summary.get("interrupted"):
        said.append("The gateway ended before this answer did: the tape holds what was committed by then.")
    if summary.get("incomplete"):
        said.append(
            "Later steps of this trace were dropped (full queue or failed write); see tape_dropped_total."
        )
    if summary.get("capture") not in (None, "full"):
        said.append(
            f"Recorded at capture level {summary['capture']}: what that level leaves out is not shown."
        )
    total = summary.get("completion_tokens")
    if total is not None and summary.get("finish_reason") and len(steps.written) < total:
        said.append(f"The tape holds {len(steps.written)} of {total} output tokens.")
    return said


def find(steps: Steps, text: str) -> list[int]:
    """Positions of the written tokens that a match of text touches, upper and lower case alike."""
    if not text:
        return []
    ends, pieces, length = [], [], 0
    decoded = steps.text
    for position in steps.written:
        pieces.append(steps.tokens[position])
        length += len(steps.tokens[position])
        ends.append(length)
    haystack, needle = decoded.lower().encode(), text.lower().encode()
    if len(haystack) != length:
        return _find_alone(steps, text)
    found, at = [], haystack.find(needle)
    while at >= 0:
        stop = at + len(needle)
        found += [
            p
            for p, end, piece in zip(steps.written, ends, pieces, strict=True)
            if end > at and end - len(piece) < stop
        ]
        at = haystack.find(needle, stop)
    return sorted(set(found))


def _find_alone(steps: Steps, text: str) -> list[int]:
    needle = text.lower()
    return [p for p in steps.written if needle in steps.tokens[p].decode("utf-8", "replace").lower()]


def kept_share(steps: Steps) -> float | None:
    """Kept decisions over the output's positions, as what-if counts them; None where nothing was decoded."""
    outcomes, actions = steps.column("outcome"), steps.column("action")
    decoded = sum(outcome not in UNWRITTEN and outcome != "forced" for outcome in outcomes)
    kept = sum(a == "keep" and o != "discarded" for a, o in zip(actions, outcomes, strict=True))
    return kept / decoded if decoded else None


def what_if_sentence(answer: Mapping[str, Any], exact: bool) -> tuple[str, list[str]]:
    """(what changes, notes): the kept share before and after, the first flip, and the estimate."""
    estimate = answer.get("estimate") or {}
    before, after = estimate.get("recorded_kept_share"), estimate.get("kept_share")
    flips = answer.get("flips") or []
    said = f"kept {share(before)} → {share(after)}"
    if not flips:
        said += "; no decision flips"
    else:
        said += f"; {len(flips)} flip{'s' * (len(flips) > 1)}, first at step {answer['first_flip']}"
    notes = []
    agreement, labels = estimate.get("agreement"), estimate.get("labels")
    if agreement is not None:
        low, high = estimate.get("low"), estimate.get("high")
        between = f" [{number(low, 3)}, {number(high, 3)}]" if low is not None else ""
        notes.append(f"est. agreement {number(agreement, 3)}{between} from {labels or 0:,} labels")
    elif labels is not None:
        notes.append(f"no estimate of agreement: {labels} labels in these score bins")
    if exact:
        notes.append(
            "Under exact the large model checks every token, so the text is the same whatever the settings."
        )
    elif flips:
        notes.append("beyond this point the text itself would differ; fork to see it")
        exact_until = answer.get("exact_until", answer["first_flip"])
        if exact_until != answer["first_flip"]:
            until = "to the end" if exact_until is None else f"up to step {exact_until}"
            notes.append(f"the flips write the same tokens {until}, so the decisions are exact there")
    unknown = answer.get("unknown") or []
    if unknown:
        notes.append(f"undecided where the small model said nothing: {len(unknown)}")
    return said, notes

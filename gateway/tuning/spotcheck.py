"""Spot checks in the terminal: answers drawn at random, a person's verdict on each, stored on the tape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from gateway.config import ConfigError
from gateway.intervals import wilson
from gateway.remote import ask
from logs.feedback import Feedback, Verdict
from logs.recorder import Recorder
from logs.tape import TapeBusy, TapeUnwritable

KEYS: dict[str, Verdict] = {"g": "good", "b": "bad", "u": "unsure"}


class Desk(Protocol):
    """Where answers come from and verdicts go: a running gateway, or the tape itself."""

    def sample(self, n: int) -> list[dict[str, Any]]:
        """Up to n finished, unreviewed answers at random, as trace summaries."""
        ...

    def review(self, request_id: str, verdict: Verdict, note: str | None, reviewer: str | None) -> None:
        """Keep a verdict."""
        ...


class HttpDesk:
    """Through the gateway at `url`, which holds the tape; raises ConfigError where it refuses."""

    def __init__(self, url: str) -> None:
        self.url = url

    def sample(self, n: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = ask(self.url, "GET", "/v1/reviews/sample", params={"n": n})["data"]
        return found

    def review(self, request_id: str, verdict: Verdict, note: str | None, reviewer: str | None) -> None:
        body = {"verdict": verdict, "note": note, "reviewer": reviewer}
        ask(self.url, "POST", f"/v1/traces/{quote(request_id, safe='')}/reviews", body=body)


@contextmanager
def tape_desk(data_dir: Path) -> Iterator[Feedback]:
    """Straight on a tape that no gateway holds; raises ConfigError."""
    try:
        recorder = Recorder(data_dir)
    except (TapeBusy, TapeUnwritable) as error:
        raise ConfigError(f"--data-dir: {error}") from None
    try:
        yield recorder.feedback()
    finally:
        recorder.close()


def check(
    desk: Desk, n: int, reviewer: str | None, read: Callable[[str], str], show: Callable[[str], None]
) -> dict[Verdict, int]:
    """Show up to n answers and keep what is said of each; how many got which verdict.

    read: a line from the reviewer: g, b, u and perhaps a note behind it; empty skips, q (or the end) stops.
    """
    counts: dict[Verdict, int] = {"good": 0, "bad": 0, "unsure": 0}
    drawn = desk.sample(n)
    for number, trace in enumerate(drawn, 1):
        show(f"--- {number} of {len(drawn)}: {trace['request_id']}")
        for choice in trace.get("choices") or [trace]:
            show(f"PROMPT  {choice.get('prompt_preview') or '(not kept)'}")
            show(f"ANSWER  {choice.get('answer_text') or '(not kept)'}")
        verdict, note = _verdict(read, show)
        if verdict == "q":
            break
        if verdict is not None:
            desk.review(trace["request_id"], KEYS[verdict], note, reviewer)
            counts[KEYS[verdict]] += 1
    return counts


def _verdict(read: Callable[[str], str], show: Callable[[str], None]) -> tuple[str | None, str | None]:
    while True:
        try:
            line = read("[g]ood, [b]ad, [u]nsure (a note may follow), empty to skip, q to stop: ").strip()
        except EOFError:
            return "q", None
        if not line:
            return None, None
        key, _, note = line.partition(" ")
        if key in (*KEYS, "q"):
            return key, note.strip() or None
        show(f"{key!r} is none of g, b, u, q")


def told(counts: dict[Verdict, int]) -> str:
    """The share of good answers among the decided ones, with its 95 % interval."""
    decided = counts["good"] + counts["bad"]
    if not decided:
        return f"no verdicts ({counts['unsure']} unsure)"
    share = counts["good"] / decided
    low, high = wilson(share, decided)
    return (
        f"good {share:.1%} of {decided} [{low:.1%}, {high:.1%}] at 95 % (Wilson); {counts['unsure']} unsure"
    )

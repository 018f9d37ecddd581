"""Spot checks in the terminal: answers drawn at random, a person's verdict on each, stored on the tape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import httpx

from gateway.config import ConfigError
from gateway.intervals import wilson
from logs.feedback import Feedback, Verdict
from logs.recorder import Recorder
from logs.tape import TapeBusy, TapeUnwritable

KEYS: dict[str, Verdict] = {"g": "good", "b": "bad", "u": "unsure"}
TIMEOUT_S = 30.0


class Desk(Protocol):
    """Where answers come from and verdicts go: a running gateway, or the tape itself."""

    def sample(self, n: int) -> list[dict[str, Any]]:
        """Up to n finished, unreviewed answers at random, as trace summaries."""
        ...

    def review(self, request_id: str, verdict: Verdict, note: str | None, reviewer: str | None) -> None:
        """Keep a verdict."""
        ...


class HttpDesk:
    """Through the gateway that holds the tape; raises ConfigError where it refuses."""

    def __init__(self, url: str, key: str | None) -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S, trust_env=False)

    def sample(self, n: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._ask("GET", f"/v1/reviews/sample?n={n}")["data"]
        return found

    def review(self, request_id: str, verdict: Verdict, note: str | None, reviewer: str | None) -> None:
        body = {"verdict": verdict, "note": note, "reviewer": reviewer}
        self._ask("POST", f"/v1/traces/{quote(request_id, safe='')}/reviews", json=body)

    def _ask(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        try:
            answer = self._http.request(method, path, **more)
        except httpx.HTTPError as error:
            raise ConfigError(f"--url: no gateway answers at {self._http.base_url}: {error}") from None
        if answer.is_error:
            raise ConfigError(f"the gateway refused: {answer.status_code} {answer.text[:200]}")
        body: dict[str, Any] = answer.json()
        return body


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
    desk: Desk, n: int, reviewer: str | None, ask: Callable[[str], str], show: Callable[[str], None]
) -> dict[Verdict, int]:
    """Show up to n answers and keep what is said of each; how many got which verdict.

    ask: a line from the reviewer: g, b, u and perhaps a note behind it; empty skips, q (or the end) stops.
    """
    counts: dict[Verdict, int] = {"good": 0, "bad": 0, "unsure": 0}
    drawn = desk.sample(n)
    for number, trace in enumerate(drawn, 1):
        show(f"--- {number} of {len(drawn)}: {trace['request_id']}")
        for choice in trace.get("choices") or [trace]:
            show(f"PROMPT  {choice.get('prompt_preview') or '(not kept)'}")
            show(f"ANSWER  {choice.get('answer_text') or '(not kept)'}")
        verdict, note = _verdict(ask, show)
        if verdict == "q":
            break
        if verdict is not None:
            desk.review(trace["request_id"], KEYS[verdict], note, reviewer)
            counts[KEYS[verdict]] += 1
    return counts


def _verdict(ask: Callable[[str], str], show: Callable[[str], None]) -> tuple[str | None, str | None]:
    while True:
        try:
            line = ask("[g]ood, [b]ad, [u]nsure (a note may follow), empty to skip, q to stop: ").strip()
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

"""Decision replay over a tape: one trace or all of it, added up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
from msgspec import Struct

from gateway.recorded import COLUMNS
from gateway.replay import UnknownPolicy, replay
from logs.reader import Reader

SHOWN = 20
"""Mismatches that are told one by one."""


class ReplayReport(Struct, frozen=True, kw_only=True):
    """decisions recomputed, how many recorded values do not match, the first of them in words."""

    decisions: int
    mismatches: int
    shown: list[str]

    def __str__(self) -> str:
        return f"{self.decisions} decisions, {self.mismatches} mismatches"


def replay_trace(reader: Reader, request_id: str) -> ReplayReport | None:
    """All choices of one trace; None when it is not on the tape."""
    choices = reader.choices(request_id)
    if not choices:
        return None
    return _add_up((row, reader.steps(request_id, row["choice"], columns=COLUMNS)) for row in choices)


def replay_tape(reader: Reader) -> ReplayReport:
    """Everything on the tape, a few traces in memory at a time."""
    return _add_up(reader.every_choice(COLUMNS))


def _add_up(choices: Iterable[tuple[Mapping[str, Any], pa.Table]]) -> ReplayReport:
    decisions = mismatches = 0
    shown: list[str] = []
    for row, steps in choices:
        try:
            result = replay(row, steps)
        except UnknownPolicy as error:
            found = [f"{row['request_id']} choice {row['choice']}: {error}"]
        else:
            decisions += result.decisions
            found = [str(mismatch) for mismatch in result.mismatches]
        mismatches += len(found)
        shown += found[: SHOWN - len(shown)]
    return ReplayReport(decisions=decisions, mismatches=mismatches, shown=shown)

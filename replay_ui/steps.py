"""The recorded steps of one choice, as columns, and the ways to walk through them."""

from __future__ import annotations

import base64
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

UNWRITTEN = frozenset({"rejected", "discarded"})
GUARDS = frozenset({"loop_guard", "fact_guard"})

JUMPS = {
    "rejection": "R",
    "large": "L",
    "guard": "G",
    "audit": "A",
    "lowest gap": "M",
}
"""What one can jump to, and its key; shift goes back."""

LOWEST = 25
"""How many of the lowest gaps one jumps through; from anywhere else the jump goes to the very lowest."""


def _bytes(value: object) -> bytes:
    """token_bytes as the API sends them (base64 text), or as Arrow does (bytes)."""
    if isinstance(value, str):
        return base64.b64decode(value)
    return value if isinstance(value, bytes) else b""


@dataclass(frozen=True)
class Steps:
    """Rows of the tape in seq order, one list a column; a *position* is a row's place in that order."""

    columns: Mapping[str, Sequence[Any]]
    tokens: list[bytes] = field(default_factory=list)

    @classmethod
    def read(cls, columns: Mapping[str, Sequence[Any]]) -> Steps:
        """Steps from the API's columns; an absent column reads as None in every row."""
        order = sorted(range(len(columns.get("seq", ()))), key=lambda i: columns["seq"][i])
        ordered = {name: [values[i] for i in order] for name, values in columns.items()}
        return cls(ordered, [_bytes(v) for v in ordered.get("token_bytes", [None] * len(order))])

    def __len__(self) -> int:
        return len(self.tokens)

    def column(self, name: str) -> Sequence[Any]:
        """The values of one column, None where the tape has none."""
        return self.columns.get(name) or [None] * len(self)

    def row(self, position: int) -> dict[str, Any]:
        """One step as a mapping from column to value."""
        return {name: values[position] for name, values in self.columns.items()}

    @cached_property
    def written(self) -> list[int]:
        """Positions of the rows that are the output, in output order."""
        return [i for i, outcome in enumerate(self.column("outcome")) if outcome not in UNWRITTEN]

    @cached_property
    def by_idx(self) -> dict[int, int]:
        """Output index -> position."""
        idx = self.column("idx")
        return {int(idx[i]): i for i in self.written}

    @cached_property
    def by_token(self) -> dict[int, int]:
        """Token id -> a position that holds it, for the bytes."""
        return {int(token): i for i, token in enumerate(self.column("token_id")) if token is not None}

    @cached_property
    def text(self) -> str:
        """The whole output."""
        return b"".join(self.tokens[i] for i in self.written).decode("utf-8", "replace")

    @cached_property
    def disagrees(self) -> list[bool]:
        """Whether the large model was seen to want another token than the one in the row."""
        agrees, tier = self.column("audit_agrees"), self.column("tier")
        return [agrees[i] is False and tier[i] != "large" for i in range(len(self))]

    @cached_property
    def jumps(self) -> dict[str, list[int]]:
        """For each kind of jump its positions: in order, or for `lowest gap` from the lowest up."""
        outcome, reason, tier = self.column("outcome"), self.column("reason"), self.column("tier")
        gap = self.column("gap")
        rows = range(len(self))
        return {
            "rejection": [i for i in rows if outcome[i] == "recovered"]
            or [i for i in rows if outcome[i] == "rejected"],
            "large": [i for i in self.written if tier[i] == "large"],
            "guard": [i for i in rows if reason[i] in GUARDS],
            "audit": [i for i in rows if self.disagrees[i]],
            "lowest gap": sorted((i for i in self.written if gap[i] is not None), key=lambda i: (gap[i], i))[
                :LOWEST
            ],
        }

    def jump(self, position: int, kind: str, back: bool = False) -> int:
        """The next (or previous) place of that kind; where there is none, position itself."""
        places = self.jumps[kind]
        if kind == "lowest gap":
            if position not in places:
                return places[0] if places else position
            rank = places.index(position) + (-1 if back else 1)
            return places[rank] if 0 <= rank < len(places) else position
        if back:
            return max((p for p in places if p < position), default=position)
        return min((p for p in places if p > position), default=position)

    def move(self, position: int, by: int, drafts: bool = False) -> int:
        """by steps on (or back) from position, over the written rows alone unless drafts are shown."""
        if not len(self):
            return 0
        if drafts:
            return min(max(position + by, 0), len(self) - 1)
        written = self.written
        if not written:
            return 0
        at = bisect_right(written, position) - 1
        if by < 0 and (at < 0 or written[at] != position):
            at += 1
        return written[min(max(at + by, 0), len(written) - 1)]

    def rejected_before(self, position: int) -> int | None:
        """The position of the draft that the recovered token at position replaced."""
        idx, outcome = self.column("idx"), self.column("outcome")
        for i in range(position - 1, -1, -1):
            if outcome[i] == "rejected" and idx[i] == idx[position]:
                return i
            if outcome[i] not in UNWRITTEN:
                return None
        return None

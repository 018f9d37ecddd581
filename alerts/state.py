"""Small state that must survive a restart: one JSON file, replaced as a whole."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class StateDamaged(Exception):
    """The file is there and cannot be read; it was set aside under the name in the message."""


class StateFile:
    """A JSON object on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, state: dict[str, Any]) -> None:
        """Replace the file; a crash leaves either the old or the new state."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_name(self.path.name + ".new")
        with fresh.open("w", encoding="utf-8") as file:
            file.write(json.dumps(state))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.path)

    def load(self) -> dict[str, Any] | None:
        """The state, or None where none was saved; raises StateDamaged."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        try:
            state = json.loads(text)
            if not isinstance(state, dict):
                raise ValueError("not an object")
        except ValueError as error:
            raise self.set_aside(str(error)) from None
        return state

    def set_aside(self, why: str) -> StateDamaged:
        """Move a file that makes no sense out of the way; the exception that says so."""
        aside = self.path.with_name(self.path.name + ".damaged")
        self.path.replace(aside)
        return StateDamaged(f"{self.path.name} cannot be read ({why}); set aside as {aside}")

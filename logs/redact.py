"""The redaction hook: a team's own function that sees every row before it is written down."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

Redact = Callable[[str, dict[str, Any]], dict[str, Any]]
"""redact(table, row) -> row: table is `requests` or `steps`, row maps column to value."""

KEYS = ("trace_no", "request_id", "choice", "seq")
"""Columns that a hook cannot change: without them rows would not find each other."""


class BadHook(ValueError):
    """The dotted path names no function."""


class RedactionFailed(Exception):
    """The hook raised or returned no row; what it was given is not written down."""


def load(path: str) -> Redact:
    """The function at `package.module.function`; raises BadHook."""
    module, _, name = path.rpartition(".")
    try:
        hook = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadHook(f"{path!r} cannot be loaded: {error}") from None
    if not callable(hook):
        raise BadHook(f"{path!r} is not a function")
    return hook  # type: ignore[no-any-return]  # what it returns is checked at each call


def redacted(hook: Redact, table: str, row: dict[str, Any]) -> dict[str, Any]:
    """The row as the hook wants it, keys kept; columns it left out are null. Raises RedactionFailed."""
    kept = {name: row[name] for name in KEYS if name in row}
    try:
        changed = hook(table, dict(row))
        unknown = set(changed) - set(row)
    except Exception as error:
        raise RedactionFailed(f"{type(error).__name__}: {error}") from error
    if unknown:
        raise RedactionFailed(f"it added columns that {table} does not have: {sorted(unknown)}")
    return changed | kept

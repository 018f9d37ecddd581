"""Opening the tape's file: one process at a time, and a damaged file never stops the gateway."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import duckdb
import structlog

from logs import schema

FILE = "tape.duckdb"
LOCK = "tape.lock"
QUARANTINE = "quarantine"

SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    # Decoding needs the cores; on two of them one thread also makes a commit cheaper by a third.
    "threads": max(1, (os.cpu_count() or 1) // 2),
    "memory_limit": "2GB",
    "preserve_insertion_order": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
}

log = structlog.get_logger("logs.tape")


class TapeBusy(Exception):
    """Another process holds this data directory."""


class TapeUnwritable(Exception):
    """The data directory cannot be written."""


@dataclass(slots=True)
class Tape:
    """An open, writable tape. quarantined: damaged files set aside while opening."""

    data_dir: Path
    connection: duckdb.DuckDBPyConnection
    lock: IO[str]
    quarantined: list[Path] = field(default_factory=list)

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """A connection of one's own, for one thread."""
        return self.connection.cursor()

    def reopen(self) -> None:
        """Open the file again after a fatal error closed it to every connection; raises duckdb.Error."""
        self.connection.close()
        self.connection = duckdb.connect(str(self.data_dir / FILE), config=SETTINGS)

    def close(self) -> None:
        """Checkpoint, close and let other processes in."""
        self.connection.close()
        self.lock.close()


def open_tape(data_dir: Path, now: Callable[[], float] = time.time) -> Tape:
    """Open or create the tape in data_dir for writing.

    A damaged write-ahead log, then a damaged file, is moved to quarantine/ with a loud line and the
    tape starts again without it. Raises TapeBusy, TapeUnwritable, schema.TapeTooNew.
    """
    lock = _lock(data_dir)
    path = data_dir / FILE
    quarantined: list[Path] = []
    try:
        # At most two things can be damaged: the write-ahead log and the file itself.
        for damaged in (path.with_name(FILE + ".wal"), path, None):
            try:
                connection = duckdb.connect(str(path), config=SETTINGS)
                schema.migrate(connection)
                return Tape(data_dir, connection, lock, quarantined)
            except duckdb.Error as error:
                _raise_unless_damaged(error, path)
                if damaged is None:
                    raise
                quarantined += _quarantine(damaged, str(error), now())
    except BaseException:
        lock.close()
        raise
    raise AssertionError("unreachable")


def _lock(data_dir: Path) -> IO[str]:
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        lock = (data_dir / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise TapeUnwritable(
            f"the data directory {data_dir} cannot be written: {error.strerror or error}"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        holder = lock.read(20).strip()
        lock.close()
        who = f" (PID {holder})" if holder else ""
        raise TapeBusy(f"the data directory {data_dir} is in use by another process{who}") from None
    try:
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
    except OSError:
        # A full disk cannot take the PID; the lock itself holds.
        log.warning("tape_lock_unmarked", data_dir=str(data_dir))
    return lock


def _raise_unless_damaged(error: duckdb.Error, path: Path) -> None:
    """Only damage is set aside: a file that is locked or not permitted is left where it is."""
    text = str(error)
    if "Could not set lock" in text:
        raise TapeBusy(f"the tape {path} is in use by another process: {text.splitlines()[0]}") from None
    if "Permission denied" in text or "Read-only file system" in text or "No space left" in text:
        raise TapeUnwritable(f"the tape {path} cannot be written: {text.splitlines()[0]}") from None


def _quarantine(path: Path, reason: str, now: float) -> list[Path]:
    if not path.exists():
        return []
    folder = path.parent / QUARANTINE
    folder.mkdir(exist_ok=True)
    target = folder / f"{path.name}.{int(now * 1000)}"
    while target.exists():
        target = target.with_name(target.name + "x")
    path.rename(target)
    log.error("tape_quarantined", file=str(path), moved_to=str(target), reason=reason.splitlines()[0])
    return [target]

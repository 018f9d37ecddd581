"""The model cache on disk: where it is, one writer at a time, finished folders only, content hashes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
import platformdirs

from gateway.progress import progress, say
from gateway.servable import ModelsError

BLOCK = 8 * 2**20
"""Bytes read at a time."""


def cache_dir() -> Path:
    """$TOKENTAPE_CACHE, else the user's cache directory; not created here."""
    named = os.environ.get("TOKENTAPE_CACHE")
    return Path(named).expanduser().absolute() if named else Path(platformdirs.user_cache_dir("tokentape"))


@contextmanager
def one_at_a_time(cache: Path, name: str) -> Iterator[None]:
    """Hold the cache's lock of that name; another process that asks for it waits, and says so."""
    path = cache / "locks" / f"{name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path)
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            say(f"{name}: waiting for another process that is preparing it ({path})")
            lock.acquire()
    except OSError as error:
        raise ModelsError(f"model cache {cache}: {error.strerror or error}") from error
    try:
        yield
    finally:
        lock.release()


def publish(folder: Path, make: Callable[[Path], None]) -> None:
    """Fill a new directory by `make`, then give it its name by one rename; nothing is left of a failure.

    Call under the folder's lock: what an interrupted run left half-made is removed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{folder.name}-"
    for stale in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    half = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        make(half)
        # Temporary directories and safetensors files are private by default; a cache may be shared.
        half.chmod(0o755)
        for file in half.iterdir():
            file.chmod(0o644)
        half.rename(folder)
    finally:
        shutil.rmtree(half, ignore_errors=True)


def file_sha256(path: Path, label: str) -> str:
    """Hex sha256 of a file, with a progress bar."""
    digest = hashlib.sha256()
    with path.open("rb") as file, progress(label, path.stat().st_size) as advance:
        while block := file.read(BLOCK):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()


def model_hash(folder: Path) -> str:
    """Hex sha256 over the names and contents of a model folder's config.json and safetensors files.

    Remembered in the cache for as long as the files' sizes and times stay the same.
    """
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    return remembered_hash(files, f"{folder.name}: hash")


def remembered_hash(files: list[Path], label: str) -> str:
    """Hex sha256 over the names and contents of files, read again only when a size or time has changed."""
    stats = [path.stat() for path in files]
    stamp = [[str(p.absolute()), s.st_size, s.st_mtime_ns] for p, s in zip(files, stats, strict=True)]
    key = hashlib.sha256(json.dumps([row[0] for row in stamp]).encode()).hexdigest()[:32]
    note = cache_dir() / "hashes" / f"{key}.json"
    try:
        known = json.loads(note.read_text(encoding="utf-8"))
        if known["stamp"] == stamp:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    digest = hashlib.sha256()
    with progress(label, sum(s.st_size for s in stats)) as advance:
        for path in files:
            inner = hashlib.sha256()
            with path.open("rb") as file:
                while block := file.read(BLOCK):
                    inner.update(block)
                    advance(len(block))
            digest.update(f"{path.name} {inner.hexdigest()}\n".encode())
    value = digest.hexdigest()
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        half = note.with_suffix(f".{os.getpid()}")
        half.write_text(json.dumps({"stamp": stamp, "sha256": value}), encoding="utf-8")
        half.replace(note)
    except OSError as error:
        # A cache that cannot be written costs the next start some seconds, nothing else.
        say(f"{note}: hash not remembered ({error.strerror})")
    return value

"""The fleet's shared storage: what each gateway has closed, under its own prefix, copied to all the others.

<share>/fleet/<gateway>/segments/<table>/dt=<day>/<name>, as in a data directory. Files are never changed: a
copy is needed once, an interrupted one is made again, and `requests` goes last, so that a segment is complete
once that file is there. fsspec does the moving (a path, s3://, gs://, ...). DuckDB's httpfs would have to be
downloaded at run time, and would make every query of the tape wait for the network and fail with it.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import duckdb
import fsspec
import structlog

from logs.numbers import FIRST
from logs.schema import TABLES, VERSION, names
from logs.segments import (
    FLEET,
    FOLDER,
    MOVED_TABLES,
    Segment,
    describe,
    discard,
    enter,
    listed,
    named,
    spanning,
)

MARKER = "gateway.json"
"""In a gateway's prefix: which data directory writes there."""
ID_FILE = "fleet.id"
GATEWAY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FILE = re.compile(
    r"(?P<gateway>[^/]+)/segments/(?P<table>[a-z]+)/dt=(?P<dt>\d{4}-\d\d-\d\d)/(?P<name>[^/]+)"
)

log = structlog.get_logger("logs.share")


class ShareError(Exception):
    """The shared storage cannot be used; the message says why."""


class ShareTaken(ShareError):
    """The name is another data directory's, or not the one that this one has had before."""


class _Foreign(Exception):
    """A segment on the share that this gateway cannot read."""


@dataclass(slots=True)
class Synced:
    """What one look at the share has done: segments sent, taken in, and dropped since their gateway did."""

    sent: int = 0
    taken: int = 0
    dropped: int = 0


class Share:
    """One gateway's side of the shared storage. Not for two threads at a time.

    Raises ShareError where the URL cannot be used, ShareTaken where the name cannot be had.
    """

    def __init__(self, url: str, gateway: str, data_dir: Path) -> None:
        self.url = url
        self.gateway = gateway
        self.last_sync = 0.0
        self._data_dir = data_dir
        self._unreadable: set[str] = set()
        with _as_share_error(url):
            self._files, root = fsspec.url_to_fs(url)
            self._root = f"{root.rstrip('/')}/{FLEET}"
            self._claim()

    def sync(self, query: duckdb.DuckDBPyConnection) -> Synced | None:
        """Send what is missing there, take in what is missing here; None, and a logged line, on failure."""
        try:
            with _as_share_error(self.url):
                self._check_claim()
                there = self._listing()
                done = Synced()
                self._send(query, there, done)
                self._take(query, there, done)
        except ShareError as error:
            log.error("tape_share_failed", share=self.url, error=str(error))
            return None
        self.last_sync = time.time()
        return done

    # --- who writes where ---

    @property
    def _marker(self) -> str:
        return f"{self._root}/{self.gateway}/{MARKER}"

    def _claim(self) -> None:
        """Put the marker, or find it ours."""
        id_file = self._data_dir / ID_FILE
        if not id_file.exists():
            id_file.write_text(f"{secrets.token_hex(16)} {self.gateway}", encoding="utf-8")
        self._id, _, named = id_file.read_text(encoding="utf-8").strip().partition(" ")
        if named != self.gateway:
            # Its segments lie there under the old name; under a new one they would all be there twice.
            raise ShareTaken(f"this data directory is {named!r} in the fleet and must stay so")
        if not self._files.exists(self._marker):
            self._files.makedirs(f"{self._root}/{self.gateway}", exist_ok=True)
            self._files.pipe_file(self._marker, json.dumps({"id": self._id}).encode())
        self._check_claim()

    def _check_claim(self) -> None:
        """An unmounted path looks like an empty one: without the marker nothing is concluded from it."""
        try:
            owner = json.loads(self._files.cat_file(self._marker))["id"]
        except FileNotFoundError:
            raise ShareError(f"{self._marker} is gone: is the storage mounted?") from None
        except (ValueError, KeyError, TypeError):
            raise ShareError(f"{self._marker} cannot be read") from None
        if owner != self._id:
            raise ShareTaken(
                f"the name {self.gateway!r} is taken there by another data directory; "
                f"remove {self._marker} if that one is gone for good"
            )

    def _listing(self) -> dict[Segment, dict[str, int]]:
        """Segment by name -> table -> bytes there; files that are no part of a segment are not looked at."""
        self._files.invalidate_cache()
        there: dict[Segment, dict[str, int]] = {}
        for path, about in self._files.find(self._root, detail=True).items():
            match = _FILE.fullmatch(path.removeprefix(f"{self._root}/"))
            if match is None or match["table"] not in MOVED_TABLES or not GATEWAY.fullmatch(match["gateway"]):
                continue
            with contextlib.suppress(ValueError):
                segment = named(PurePosixPath(f"dt={match['dt']}/{match['name']}"), match["gateway"])
                there.setdefault(segment, {})[match["table"]] = about["size"]
        return there

    # --- ours, there ---

    def _send(
        self, query: duckdb.DuckDBPyConnection, there: dict[Segment, dict[str, int]], done: Synced
    ) -> None:
        ours: set[Segment] = set()
        for segment in listed(query):
            # Numbers that were counted before there was a fleet mean other traces on other tapes.
            if segment.gateway is not None or segment.first_no < FIRST:
                continue
            key = _key(segment, self.gateway)
            ours.add(key)
            sizes, sent = there.get(key, {}), False
            for table in MOVED_TABLES:
                file = segment.path(self._data_dir, table)
                if sizes.get(table) != file.stat().st_size:
                    self._put(file, self._remote(key, table))
                    sent = True
            done.sent += sent
        for key in there:
            if key.gateway == self.gateway and key not in ours:
                for table in reversed(MOVED_TABLES):
                    with contextlib.suppress(FileNotFoundError):
                        self._files.rm_file(self._remote(key, table))

    def _put(self, file: Path, remote: str) -> None:
        """Object stores show a file once it is whole; on a path it gets its name when it is."""
        if _is_local(self._files):
            self._files.makedirs(remote.rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(file), remote + ".tmp")
            Path(remote + ".tmp").replace(remote)
        else:
            self._files.put_file(str(file), remote)

    # --- theirs, here ---

    def _take(
        self, query: duckdb.DuckDBPyConnection, there: dict[Segment, dict[str, int]], done: Synced
    ) -> None:
        known = {_key(segment, segment.gateway): segment for segment in listed(query) if segment.gateway}
        for key, sizes in there.items():
            if key.gateway == self.gateway or key in known or set(sizes) != set(MOVED_TABLES):
                continue
            done.taken += self._take_one(query, key)
        for key, segment in known.items():
            if "requests" not in there.get(key, {}):
                discard(query, self._data_dir, segment)
                done.dropped += 1

    def _take_one(self, query: duckdb.DuckDBPyConnection, key: Segment) -> bool:
        for table in MOVED_TABLES:
            file = key.path(self._data_dir, table)
            file.parent.mkdir(parents=True, exist_ok=True)
            unfinished = file.with_name(file.name + ".tmp")
            self._files.get_file(self._remote(key, table), str(unfinished))
            unfinished.replace(file)
        try:
            segment = _checked(query, key, self._data_dir)
        except (duckdb.Error, _Foreign) as error:
            for table in MOVED_TABLES:
                key.path(self._data_dir, table).unlink(missing_ok=True)
            where = f"{key.gateway}/{key.dt}/{key.name}"
            if where not in self._unreadable:
                log.error("tape_share_unreadable", segment=where, error=str(error).splitlines()[0])
            self._unreadable.add(where)
            return False
        query.begin()
        try:
            enter(query, self._data_dir, segment)
            query.commit()
        except BaseException:
            query.rollback()
            raise
        log.info("tape_segment_taken", gateway=key.gateway, name=key.name, steps=segment.num_steps)
        return True

    def _remote(self, key: Segment, table: str) -> str:
        return f"{self._root}/{key.gateway}/{FOLDER}/{table}/dt={key.dt}/{key.name}"


def _checked(query: duckdb.DuckDBPyConnection, key: Segment, data_dir: Path) -> Segment:
    """What the files of another gateway's segment say; raises duckdb.Error or _Foreign for what is none.

    One bad file among those that a query spans would fail all of it, so columns and types are looked at here.
    """
    if key.version > VERSION:
        raise _Foreign(f"schema version {key.version}: a later tokentape wrote it")
    segment = describe(key.path(data_dir, "requests"), data_dir, key.gateway)
    for table in MOVED_TABLES:
        relation = spanning(table, names(table), [segment], data_dir, None)
        for name, kind, *_ in query.execute(f"DESCRIBE SELECT * FROM {relation}").fetchall():
            wanted = next(column.sql for column in TABLES[table] if column.name == name)
            # DuckDB quotes a struct's fields where their names are words of its own.
            if kind.replace('"', "") != wanted:
                raise _Foreign(f"{table}.{name} is {kind}, not {wanted}")
    return segment


def _key(segment: Segment, gateway: str | None) -> Segment:
    """The segment as its name alone tells it."""
    return named(PurePosixPath(f"dt={segment.dt}/{segment.name}"), gateway)


def _is_local(files: Any) -> bool:
    protocols = files.protocol if isinstance(files.protocol, tuple) else (files.protocol,)
    return "file" in protocols


@contextlib.contextmanager
def _as_share_error(url: str) -> Iterator[None]:
    """Whatever the storage's library raises, as ShareError; credentials in the URL are not repeated."""
    try:
        yield
    except (ShareError, duckdb.Error):
        raise
    except ImportError as error:
        raise ShareError(f"{url.partition('://')[0]}:// needs another package: {error}") from None
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise ShareError(f"{type(error).__name__}: {first}") from None

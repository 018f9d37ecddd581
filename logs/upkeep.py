"""Housekeeping of the tape on a thread of its own: closed hours become Parquet, old segments are dropped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import duckdb
import structlog

from logs.segments import SETTLE_S, Segment, compact, expire, live_bytes
from logs.share import Share

PERIOD_S = 60.0

log = structlog.get_logger("logs.upkeep")


@dataclass(frozen=True, slots=True)
class Keep:
    """How much of the tape stays, and when live rows move to Parquet.

    segment_bytes: size of the live tables above which the running hour's finished traces move too.
    max_age_s, max_bytes: segments older than that, and the oldest beyond that size, are dropped; None: never.
    close_s: how often finished traces move whatever the hour and the size, as a fleet wants it; None: never.
    """

    segment_bytes: int = 256 * 2**20
    max_age_s: float | None = None
    max_bytes: int | None = None
    close_s: float | None = None

    @property
    def period_s(self) -> float:
        """How often the tape is looked after."""
        return PERIOD_S if self.close_s is None else min(PERIOD_S, self.close_s)

    @property
    def settle_s(self) -> float:
        """How long a trace of the running hour must be over to move."""
        return SETTLE_S if self.close_s is None else min(SETTLE_S, self.close_s)

    @classmethod
    def of(
        cls,
        segment_mb: int,
        retention_days: float | None,
        retention_gb: float | None,
        close_s: float | None = None,
    ) -> Keep:
        """From the units of the config file: MiB, days, GiB."""
        return cls(
            segment_bytes=segment_mb * 2**20,
            max_age_s=None if retention_days is None else retention_days * 86_400,
            max_bytes=None if retention_gb is None else int(retention_gb * 2**30),
            close_s=close_s,
        )


class Upkeep:
    """Runs once a minute until stopped; writing is held while rows leave the live tables.

    share: where a fleet's segments meet; brought up to date after each run.
    """

    def __init__(
        self,
        cursor: Callable[[], duckdb.DuckDBPyConnection],
        data_dir: Path,
        writing: AbstractContextManager[object],
        keep: Keep,
        clock: Callable[[], float] = time.time,
        share: Share | None = None,
    ) -> None:
        self._cursor = cursor
        self._data_dir = data_dir
        self._writing = writing
        self._keep = keep
        self._clock = clock
        self._share = share
        self._closed = clock()
        self._one_at_a_time = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tape-upkeep", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End after the move in progress."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def run_once(
        self, everything: bool = False, settle_s: float | None = None
    ) -> tuple[list[Segment], list[Segment]]:
        """Move and drop what is due now; (segments made, segments dropped).

        settle_s: how long a trace must be over to move, instead of `Keep.settle_s`.
        """
        now, keep = self._clock(), self._keep
        settle_s = keep.settle_s if settle_s is None else settle_s
        with self._one_at_a_time:
            query = self._cursor()
            due = keep.close_s is not None and now - self._closed >= keep.close_s
            everything = everything or due or live_bytes(query) > keep.segment_bytes
            self._closed = now if everything else self._closed
            made = compact(
                query, self._data_dir, self._writing, now=now, everything=everything, settle_s=settle_s
            )
            dropped = expire(
                query, self._data_dir, now=now, max_age_s=keep.max_age_s, max_bytes=keep.max_bytes
            )
            if self._share is not None and everything:
                self._share.sync(query)
        return made, dropped

    def _run(self) -> None:
        while not self._stopped.wait(self._keep.period_s):
            try:
                self.run_once()
            except Exception as error:
                # A full disk or a conflict: the rows are still live, the next minute tries again.
                log.error("tape_upkeep_failed", error=f"{type(error).__name__}: {error}")

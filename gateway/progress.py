"""Progress of long work on stderr: a bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from huggingface_hub.utils.tqdm import disable_progress_bars
from tqdm import tqdm

LINE_SHARE = 0.25
"""Away from a terminal a line is written each time this share of the work is done."""


def say(text: str) -> None:
    """One line on stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def quiet_hub() -> None:
    """Away from a terminal, keep the hub client's own bars from writing thousands of lines."""
    if not sys.stderr.isatty():
        disable_progress_bars()


@contextmanager
def progress(label: str, total: int, unit: str = "B") -> Iterator[Callable[[int], None]]:
    """Shows how far work of `total` units has come; yields a function that adds to what is done."""
    if sys.stderr.isatty():
        with tqdm(total=total, desc=label, unit=unit, unit_scale=True, dynamic_ncols=True) as bar:
            yield bar.update
        return
    began, done, told = time.monotonic(), 0, 0.0

    def advance(amount: int) -> None:
        nonlocal done, told
        done += amount
        share = done / total if total else 1.0
        if told + LINE_SHARE <= share < 1.0:
            told = share - share % LINE_SHARE
            say(f"{label}: {told:.0%}")

    say(f"{label} ...")
    yield advance
    say(f"{label}: done in {time.monotonic() - began:.0f} s")

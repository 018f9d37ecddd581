"""Fixtures that several test files share."""

from __future__ import annotations

import os

# Before torch loads: spinning OpenMP threads stall everything else on a small machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import gc
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import structlog

if TYPE_CHECKING:
    from tiny_pair import TinyPair

# Tracebacks with all locals take seconds to draw.
structlog.configure(
    processors=[
        structlog.processors.add_log_level,
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)


def pytest_collection_finish() -> None:
    """Collecting garbage walks over all that was imported, over and over, unless it is set apart. And where
    several workers share the machine, threads of each would only wait for those of the others."""
    gc.collect()
    gc.freeze()
    torch = sys.modules.get("torch")
    if torch is not None and "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """A command under test sets the log up for its own process; the next test must not inherit that."""
    before, root = structlog.get_config(), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.configure(**before)
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """The `tiny` preset, built and loaded once: folder, tokenizer, small and large with KV caches.

    Its caches are shared, so only one engine may be busy with it at a time.
    """
    # Imported here, so that tests without a model do not pay for torch.
    import torch
    from tiny_pair import TinyPair

    torch.set_num_threads(1)
    return TinyPair.build(tmp_path_factory.mktemp("tiny"))

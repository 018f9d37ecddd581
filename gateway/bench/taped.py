"""What the tape costs: a run whose every step is recorded, in a folder that goes when the run is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from gateway.core import Tick
from gateway.request import Request, Served, Trace
from logs.recorder import Recorder


@contextmanager
def recording(served: Served, requests: Sequence[Request]) -> Iterator[Callable[[Tick], None]]:
    """A tape that has admitted the requests, as what is to be told every tick. Raises what Recorder does."""
    with TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder))
        try:
            for request in requests:
                recorder.on_admit(Trace(request, served))
            yield recorder.on_tick
        finally:
            recorder.close()

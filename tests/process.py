"""`tokentape serve` as a process of its own, as a user starts it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import IO


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Serving:
    """A gateway process; `url` is what it printed when it was ready, `seconds` how long that took."""

    def __init__(
        self, data_dir: Path, *arguments: str, preset: str = "tiny", timeout_s: float = 300.0
    ) -> None:
        self.port, self.ui_port = free_port(), free_port()
        self.log = data_dir.parent / "serve.log"
        began = time.monotonic()
        with self.log.open("a") as log:
            self.process = self._start(log, data_dir, preset, arguments)
        assert self.process.stdout is not None
        late = threading.Timer(timeout_s, self.process.kill)
        late.start()
        for line in self.process.stdout:
            if line.startswith("ready "):
                self.url = line.split()[1]
                break
        else:
            late.cancel()
            raise AssertionError(self.log.read_text()[-2000:])
        late.cancel()
        self.seconds = time.monotonic() - began

    def _start(
        self, log: IO[str], data_dir: Path, preset: str, arguments: tuple[str, ...]
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "gateway.cli", "serve", "--preset", preset),
                *("--port", str(self.port), "--ui-port", str(self.ui_port), "--data-dir", str(data_dir)),
                *arguments,
            ],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )

    def __enter__(self) -> Serving:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def kill(self) -> None:
        """SIGKILL: no chance to clean up."""
        self.process.kill()
        self._reap()

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self._reap()

    def _reap(self) -> int:
        status = self.process.wait(60)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return status

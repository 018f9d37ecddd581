"""Progress: a bar on a terminal, a handful of whole lines elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from gateway.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with progress("model: join", 1000) as advance:
        advance(1000)
    last = screen.getvalue().split("\r")[-1]
    assert last.startswith("model: join: 100%|")
    assert "1.00k/1.00k" in last


def test_a_few_lines_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("model: join", 10_000) as advance:
        for _ in range(10_000):
            advance(1)
    assert capsys.readouterr().err.splitlines() == [
        "model: join ...",
        "model: join: 25%",
        "model: join: 50%",
        "model: join: 75%",
        "model: join: done in 0 s",
    ]


def test_a_failure_is_not_called_done(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with progress("model: join", 10) as advance:
            advance(9)
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        fail()
    assert "done" not in capsys.readouterr().err

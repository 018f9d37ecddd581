"""The command that serves the UI: loopback, silent, and importing no model."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

from replay_ui.serve import command


def test_it_binds_to_loopback_and_reports_to_nobody() -> None:
    argv = command(8501, "http://127.0.0.1:8000")
    pairs = dict(itertools.pairwise(argv))
    assert argv[:4] == [sys.executable, "-m", "streamlit", "run"]
    assert pairs["--server.address"] == "127.0.0.1"
    assert pairs["--server.port"] == "8501"
    assert pairs["--browser.gatherUsageStats"] == "false"
    assert argv[-3:] == ["--", "--gateway", "http://127.0.0.1:8000"]
    assert Path(argv[-4]).name == "app.py"


def test_every_option_is_one_that_streamlit_knows() -> None:
    from streamlit import config

    known = set(config.get_config_options(force_reparse=False))
    for option in command(1, "x"):
        if option.startswith("--") and option not in {"--", "--gateway"}:
            assert option.removeprefix("--") in known


def test_the_ui_process_loads_no_model_library() -> None:
    code = (
        "import sys, replay_ui.screens.replay, replay_ui.screens.compare, replay_ui.screens.advisor; "
        "print([m for m in ('torch', 'transformers', 'litestar', 'duckdb') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"

"""The command that starts the UI."""

from __future__ import annotations

import sys
from pathlib import Path

LIGHT = {"primaryColor": "#0072B2", "backgroundColor": "#ffffff", "secondaryBackgroundColor": "#f3f5f7"}
DARK = {"primaryColor": "#56B4E9", "backgroundColor": "#14171c", "secondaryBackgroundColor": "#1f242b"}


def command(port: int, gateway_url: str, host: str = "127.0.0.1", data_dir: Path | None = None) -> list[str]:
    """argv that serves the UI on host:port for the gateway at gateway_url; no telemetry, no file watching.

    data_dir: the gateway's tape, read in its place while the gateway is down.
    """
    options = {
        "server.port": port,
        "server.address": host,
        "server.headless": "true",
        "server.fileWatcherType": "none",
        "server.runOnSave": "false",
        "browser.gatherUsageStats": "false",
        "runner.magicEnabled": "false",
        "client.toolbarMode": "minimal",
        "logger.hideWelcomeMessage": "true",
        "theme.baseFontSize": 14,
        "theme.codeFontSize": "13px",
        **{f"theme.light.{name}": value for name, value in LIGHT.items()},
        **{f"theme.dark.{name}": value for name, value in DARK.items()},
    }
    app = Path(__file__).with_name("app.py")
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    own = ["--gateway", gateway_url] + (["--data-dir", str(data_dir)] if data_dir else [])
    return [sys.executable, "-m", "streamlit", "run", *flags, str(app), "--", *own]

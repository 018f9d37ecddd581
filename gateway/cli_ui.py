"""`tokentape ui`: the replay UI alone, for a gateway that runs elsewhere."""

from __future__ import annotations

import argparse
import os
from typing import Any


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("ui", help="run the replay UI alone, for a gateway that runs elsewhere")
    parser.add_argument("--url", metavar="U", default="http://127.0.0.1:8000", help="the gateway")
    parser.add_argument(
        "--host", metavar="H", default="127.0.0.1", help="address to bind (default 127.0.0.1)"
    )
    parser.add_argument("--port", type=int, metavar="N", default=8501, help="port of the UI (default 8501)")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from replay_ui.serve import command

    argv = command(arguments.port, arguments.url, arguments.host)
    # The UI takes this process's place, so that signals and the exit status are its own.
    os.execv(argv[0], argv)

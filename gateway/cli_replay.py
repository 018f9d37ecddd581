"""`tokentape replay`: recompute recorded decisions; through the running gateway when that holds the tape."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gateway.config import ConfigError
from gateway.remote import ask, data_dir_of, running_gateway, tape_reader

REPLAY_TIMEOUT_S = 3600.0
"""A whole tape may take a while."""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("replay", help="recompute every recorded decision from its recorded inputs")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("request_id", nargs="?", metavar="REQUEST_ID", help="one trace")
    what.add_argument("--all", action="store_true", help="everything on the tape")
    parser.add_argument("--data-dir", metavar="D", help="folder of the tape")
    parser.add_argument("--url", metavar="U", help="the gateway that holds the tape")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print `N decisions, M mismatches`; 1 if M > 0 or N = 0."""
    decisions, mismatches, shown = _report(arguments)
    for line in shown:
        print(line)
    print(f"{decisions} decisions, {mismatches} mismatches")
    return 1 if mismatches or not decisions else 0


def _report(arguments: argparse.Namespace) -> tuple[int, int, list[str]]:
    data_dir = data_dir_of(arguments.data_dir)
    url = arguments.url or running_gateway(data_dir)
    if url is None:
        return _directly(data_dir, arguments.request_id)
    name = arguments.request_id
    path = "/v1/replay" if name is None else f"/v1/traces/{quote(name, safe='')}/replay"
    found = ask(url, "GET", path, timeout_s=REPLAY_TIMEOUT_S)
    return found["decisions"], found["mismatches"], found["shown"]


def _directly(data_dir: Path, request_id: str | None) -> tuple[int, int, list[str]]:
    from gateway.replay_report import replay_tape, replay_trace

    reader = tape_reader(data_dir)
    try:
        report = replay_tape(reader) if request_id is None else replay_trace(reader, request_id)
    finally:
        reader.close()
    if report is None:
        raise ConfigError(f"REQUEST_ID: there is no trace {request_id!r} in {data_dir}")
    return report.decisions, report.mismatches, report.shown

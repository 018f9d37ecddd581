"""`tokentape replay`: recompute recorded decisions; through the running gateway when that holds the tape."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from gateway.config import ConfigError, load_config

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
    overrides = {} if arguments.data_dir is None else {"logs.data_dir": arguments.data_dir}
    data_dir = load_config(None, os.environ, overrides).data_dir
    url = arguments.url or running_gateway(data_dir)
    if url is not None:
        return _through(url, arguments.request_id)
    return _directly(data_dir, arguments.request_id)


def running_gateway(data_dir: Path) -> str | None:
    """Where the gateway that holds this tape listens; None when none runs."""
    try:
        url = (data_dir / "gateway.url").read_text(encoding="utf-8").strip()
        httpx.get(f"{url}/health", timeout=5, trust_env=False).raise_for_status()
    except (OSError, httpx.HTTPError):
        # A file left behind by a gateway that was killed says nothing.
        return None
    return url


def _through(url: str, request_id: str | None) -> tuple[int, int, list[str]]:
    path = "/v1/replay" if request_id is None else f"/v1/traces/{quote(request_id, safe='')}/replay"
    key = os.environ.get("TOKENTAPE_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(url.rstrip("/") + path, headers=headers, timeout=REPLAY_TIMEOUT_S, trust_env=False)
    except httpx.HTTPError as error:
        raise ConfigError(f"--url: no gateway answers at {url}: {error}") from None
    body = answer.json() if answer.headers.get("content-type") == "application/json" else {}
    if answer.status_code != 200:
        said = body.get("error", {}).get("message", answer.reason_phrase)
        raise ConfigError(f"the gateway at {url} refused: {said}")
    return body["decisions"], body["mismatches"], body["shown"]


def _directly(data_dir: Path, request_id: str | None) -> tuple[int, int, list[str]]:
    import duckdb

    from gateway.replay_report import replay_tape, replay_trace
    from logs.reader import Reader

    try:
        reader = Reader.open(data_dir)
    except duckdb.Error as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"--data-dir: the tape in {data_dir} cannot be opened: {first}") from None
    try:
        report = replay_tape(reader) if request_id is None else replay_trace(reader, request_id)
    finally:
        reader.close()
    if report is None:
        raise ConfigError(f"REQUEST_ID: there is no trace {request_id!r} in {data_dir}")
    return report.decisions, report.mismatches, report.shown

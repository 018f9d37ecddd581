"""`tokentape diagnose`: why is it slow, why is quality down, from the tape."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from typing import Any

from gateway.config import load_config
from gateway.remote import ask, data_dir_of, running_gateway, tape_reader


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "diagnose", help="the usual causes of slowness and of lost quality, measured"
    )
    parser.add_argument("--url", metavar="U", help="the gateway that holds the tape")
    parser.add_argument("--data-dir", metavar="D", help="folder of the tape, where no gateway holds it")
    parser.add_argument("--arm", metavar="A", help="only traces of this arm")
    parser.add_argument("--hours", type=float, metavar="H", help="only traces of the last H hours")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print each cause with its share, what it rests on and what would help; 1 where there is no trace."""
    since = None if arguments.hours is None else time.time() - 3600 * arguments.hours
    findings = _findings(arguments, since)
    if not findings:
        print("no traces: send requests first, or name another --data-dir, --url or --hours")
        return 1
    for finding in findings:
        share = "not measured" if finding["share"] is None else f"{100 * finding['share']:.1f} %"
        print(f"{'!' if finding['noticed'] else ' '} {finding['cause']}: {share} of {finding['of']}")
        print(f"    {finding['evidence']}")
        if finding["noticed"]:
            print(f"    -> {finding['change']}")
    return 0


def _findings(arguments: argparse.Namespace, since: float | None) -> Sequence[dict[str, Any]]:
    data_dir = data_dir_of(arguments.data_dir)
    url = arguments.url or running_gateway(data_dir)
    if url is not None:
        asked = {"arm": arguments.arm, "since": since}
        params = {name: value for name, value in asked.items() if value is not None}
        found: list[dict[str, Any]] = ask(url, "GET", "/v1/diagnose", params=params, timeout_s=600)["data"]
        return found

    from dataclasses import asdict

    from logs.diagnose import diagnose
    from logs.reader import TraceFilter

    reader = tape_reader(data_dir)
    policy = load_config(None, os.environ).policies["stable"]
    try:
        causes = diagnose(reader, policy, TraceFilter(arm=arguments.arm, since=since))
    finally:
        reader.close()
    return [asdict(cause) | {"noticed": cause.noticed} for cause in causes]

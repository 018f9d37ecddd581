"""`tokentape models pull` and `tokentape models list`."""

from __future__ import annotations

import argparse
from typing import Any


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    models = commands.add_parser("models", help="fetch and list model pairs")
    actions = models.add_subparsers(title="actions", required=True, metavar="ACTION")
    pull = actions.add_parser("pull", help="fetch, check, convert and cache a preset")
    pull.add_argument("preset", metavar="P", help="qwen-coder or tiny")
    pull.set_defaults(run=_pull)
    actions.add_parser("list", help="presets with source, licence and hashes").set_defaults(run=_list)


def _pull(arguments: argparse.Namespace) -> int:
    from gateway import presets

    pair = presets.pull(arguments.preset)
    print(f"small {pair.small}\nlarge {pair.large}")
    return 0


def _list(_: argparse.Namespace) -> int:
    from gateway import presets

    print(presets.listing())
    return 0

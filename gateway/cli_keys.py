"""`tokentape keys new`: make an API key."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

from gateway.access import Scope, new_key
from gateway.config import ConfigError

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    keys = commands.add_parser("keys", help="make API keys")
    actions = keys.add_subparsers(title="actions", required=True, metavar="ACTION")
    new = actions.add_parser(
        "new", help="print a new key on stderr and its line for auth.keys_file on stdout"
    )
    new.add_argument("name", metavar="NAME", help="who the key is for; shown in the access log")
    new.add_argument(
        "--scopes", default="infer", metavar="S", help="comma-separated: infer, read, admin (default infer)"
    )
    new.set_defaults(run=_new)


def _new(arguments: argparse.Namespace) -> int:
    if not NAME.fullmatch(arguments.name):
        raise ConfigError("NAME: expected 1 to 64 letters, digits, dots, underscores or hyphens")
    try:
        scopes = {Scope(scope) for scope in arguments.scopes.split(",")}
    except ValueError as error:
        raise ConfigError(f"--scopes: {error}") from None
    secret, line = new_key(arguments.name, scopes)
    print(f"key (shown once): {secret}", file=sys.stderr)
    print(line)
    return 0

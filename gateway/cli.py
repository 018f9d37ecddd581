"""The command `tokentape`. Nothing here imports torch before its environment is set."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from gateway import (
    cli_bench,
    cli_calibrate,
    cli_diagnose,
    cli_evaluate,
    cli_keys,
    cli_models,
    cli_replay,
    cli_rollout,
    cli_serve,
    cli_spotcheck,
    cli_tape,
    cli_ui,
)
from gateway.config import ConfigError, markdown


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0 when fine, 1 when a check failed, 2 for a usage or config error."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except ConfigError as error:
        print(f"tokentape: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return status


def build_parser() -> argparse.ArgumentParser:
    """Every command with its options."""
    parser = argparse.ArgumentParser(
        prog="tokentape",
        description="A gateway for token-level routed decoding that records every step.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    cli_serve.add_to(commands)
    cli_models.add_to(commands)
    cli_replay.add_to(commands)
    cli_tape.add_to(commands)
    cli_keys.add_to(commands)
    cli_bench.add_to(commands)
    cli_calibrate.add_to(commands)
    cli_evaluate.add_to(commands)
    cli_spotcheck.add_to(commands)
    cli_ui.add_to(commands)
    cli_diagnose.add_to(commands)
    cli_rollout.add_to(commands)
    config = commands.add_parser("config", help="print every key of the config file as Markdown tables")
    config.set_defaults(run=_print_config)
    return parser


def _print_config(_: argparse.Namespace) -> int:
    print(markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())

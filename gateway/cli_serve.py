"""`tokentape serve`: the gateway and the replay UI."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from gateway.access import Keyring, check_bind, load_keys
from gateway.config import Config, ConfigError, load_config

Commands = Any
"""argparse's subparsers, whose type is private to it."""

QUIET_OPENMP = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
"""Spinning OpenMP threads stall torch's matrix products by 8 to 16 ms when anything else runs."""


def add_to(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("serve", help="run the gateway and the replay UI")
    parser.add_argument("--config", type=Path, metavar="F", help="TOML file; its keys are in the README")
    parser.add_argument("--preset", metavar="P", help="ready model pair: qwen-coder (default) or tiny")
    parser.add_argument("--host", metavar="H", help="address to bind (default 127.0.0.1)")
    parser.add_argument("--port", type=int, metavar="N", help="port of the gateway (default 8000)")
    parser.add_argument("--ui-port", type=int, metavar="N", help="port of the replay UI (default 8501)")
    parser.add_argument("--no-ui", action="store_true", help="do not start the replay UI")
    parser.add_argument("--data-dir", metavar="D", help="folder of the tape")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT, drain, return 0."""
    # libgomp reads these when torch is first imported, which is why the imports below come late.
    for name, value in QUIET_OPENMP.items():
        os.environ.setdefault(name, value)
    config = config_from(arguments)
    keys = load_keys(config.auth.keys_file, os.environ)
    check_bind(config.server.host, keys)
    return asyncio.run(_serve(config, keys))


def config_from(arguments: argparse.Namespace) -> Config:
    """The config file, the environment, then the command line."""
    overrides = {
        "models.preset": arguments.preset,
        "server.host": arguments.host,
        "server.port": arguments.port,
        "server.ui_port": arguments.ui_port,
        "server.ui": False if arguments.no_ui else None,
        "logs.data_dir": arguments.data_dir,
    }
    return load_config(
        arguments.config, os.environ, {key: value for key, value in overrides.items() if value is not None}
    )


async def _serve(config: Config, keys: Keyring) -> int:
    from gateway.app import Gateway, listen, replay_ui_beside, url_of
    from gateway.journal import set_up_log
    from gateway.loading import load_worker
    from logs.redact import BadHook
    from logs.schema import TapeTooNew
    from logs.share import ShareError, ShareTaken
    from logs.tape import TapeBusy, TapeUnwritable

    set_up_log(config.logs.level)
    with listen(config.server.host, config.server.port) as listener, contextlib.ExitStack() as beside:
        try:
            gateway = Gateway(config, lambda observers: load_worker(config, observers), keys)
        except (TapeBusy, TapeUnwritable, TapeTooNew) as error:
            raise ConfigError(f"logs.data_dir: {error}") from None
        except ShareTaken as error:
            raise ConfigError(f"fleet.name: {error}") from None
        except ShareError as error:
            raise ConfigError(f"fleet.share: {error}") from None
        except BadHook as error:
            raise ConfigError(f"logs.redact: {error}") from None

        def on_ready(url: str) -> None:
            print(f"ready {url}", flush=True)

        if config.server.ui:
            port = config.server.ui_port
            try:
                listen("127.0.0.1", port, "server.ui_port").close()
            except ConfigError as error:
                # No reason to refuse requests: after a SIGKILL it is our own UI, which finds us again.
                print(f"replay UI not started: {error}", file=sys.stderr, flush=True)
            else:
                beside.enter_context(replay_ui_beside(url_of(listener), port, config.data_dir))
                print(f"replay UI http://127.0.0.1:{port}", file=sys.stderr, flush=True)
        await gateway.run(listener, on_ready)
    return 0

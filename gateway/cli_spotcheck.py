"""`tokentape spotcheck` and `tokentape disagreements`: what people say of answers, what models learn from."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from gateway.config import ConfigError, load_config
from gateway.remote import data_dir_of, running_gateway


def add_to(commands: Any) -> None:
    """Add both commands to the parser."""
    check = commands.add_parser("spotcheck", help="rate answers drawn at random; verdicts go on the tape")
    check.add_argument("--n", type=int, default=20, metavar="N", help="answers to draw (default 20)")
    check.add_argument("--reviewer", metavar="NAME", help="who rates")
    check.add_argument("--data-dir", metavar="D", help="folder of the tape")
    check.add_argument("--url", metavar="U", help="the gateway that holds the tape")
    check.set_defaults(run=_spotcheck)
    export = commands.add_parser(
        "disagreements", help="where the models' own tokens differ, as training data for the small model"
    )
    export.add_argument("--out", type=Path, required=True, metavar="F.jsonl", help="a new file")
    export.add_argument("--data-dir", metavar="D", help="folder of the tape; no gateway may hold it")
    export.add_argument("--config", type=Path, metavar="F", help="names the models the tape is of")
    export.add_argument("--preset", metavar="P", help="ready model pair: qwen-coder (default) or tiny")
    export.set_defaults(run=_disagreements)


def _spotcheck(arguments: argparse.Namespace) -> int:
    from gateway.tuning.spotcheck import HttpDesk, check, tape_desk, told

    if not 1 <= arguments.n <= 500:
        raise ConfigError("--n: 1 to 500")
    data_dir = data_dir_of(arguments.data_dir)
    url = arguments.url or running_gateway(data_dir)
    if url is not None:
        counts = check(HttpDesk(url), arguments.n, arguments.reviewer, input, print)
    else:
        with tape_desk(data_dir) as feedback:
            counts = check(feedback, arguments.n, arguments.reviewer, input, print)
    print(told(counts))
    return 0


def _disagreements(arguments: argparse.Namespace) -> int:
    from gateway.presets import resolve
    from gateway.text import Tokenizer
    from gateway.tuning.tape import write_disagreements

    overrides = {} if arguments.preset is None else {"models.preset": arguments.preset}
    if arguments.data_dir is not None:
        overrides["logs.data_dir"] = arguments.data_dir
    config = load_config(arguments.config, os.environ, overrides)
    tokenizer = Tokenizer.load(resolve(config.models).large)
    try:
        with arguments.out.open("x", encoding="utf-8") as file:
            count = write_disagreements(config.data_dir, tokenizer, file)
    except OSError as error:
        raise ConfigError(f"--out: {arguments.out}: {error.strerror or error}") from None
    print(f"{count} disagreements in {arguments.out}")
    return 0

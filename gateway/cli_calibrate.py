"""`tokentape calibrate`: from prompts to a policy with a stated guarantee."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from gateway.cli_serve import QUIET_OPENMP
from gateway.config import ConfigError, load_config
from gateway.core import Accept


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "calibrate",
        help="from your prompts to a policy whose disagreement with the large model is bounded",
        description="Draw the curve from threshold to kept share, agreement and speed, then really run the "
        "policy on held-out prompts, strictest threshold first, and keep the lowest that is shown to stay "
        "within the bound. Exit 1 if none is. A run that was stopped goes on where it was.",
    )
    parser.add_argument(
        "--prompts", type=Path, required=True, metavar="F",
        help="JSON lines with `prompt` or `messages`, or text with a prompt a line; 200 to 500 of them",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, required=True, metavar="policy.toml", help="report and PNG go beside it"
    )
    parser.add_argument(
        "--max-disagreement", type=float, default=0.02, metavar="B",
        help="bound on the mean share of output tokens that the large model would not write (default 0.02)",
    )  # fmt: skip
    parser.add_argument("--confidence", type=float, default=0.95, metavar="C", help="default 0.95")
    parser.add_argument("--accept", choices=list(Accept), help="default: the config's, else trust")
    parser.add_argument("--name", default="stable", help="name of the policy in the file (default stable)")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="of an answer (default 128)")
    parser.add_argument("--rows", type=int, default=8, metavar="N", help="prompts side by side (default 8)")
    parser.add_argument("--config", type=Path, metavar="F", help="models, and the policy to start from")
    parser.add_argument("--preset", metavar="P", help="ready model pair: qwen-coder (default) or tiny")
    parser.add_argument("--learn", action="store_true", help="train a router and use it if it beats the gap")
    parser.add_argument(
        "--hidden-state", action="store_true",
        help="with --learn: also try routers that read the small model's last hidden state",
    )  # fmt: skip
    parser.add_argument("--tape", type=Path, metavar="D", help="with --learn: learn from its audits too")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Calibrate; 0 with a policy written, 1 where no threshold qualifies."""
    for name, value in QUIET_OPENMP.items():
        os.environ.setdefault(name, value)
    for name in ("max_disagreement", "confidence"):
        if not 0 < getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: must lie strictly between 0 and 1")
    for name in ("max_tokens", "rows"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: at least 1")
    for option, given in (("--tape", arguments.tape is not None), ("--hidden-state", arguments.hidden_state)):
        if given and not arguments.learn:
            raise ConfigError(f"{option}: only with --learn")
    if not arguments.out.absolute().parent.is_dir():
        raise ConfigError(f"--out: there is no folder {arguments.out.absolute().parent}")
    overrides = {} if arguments.preset is None else {"models.preset": arguments.preset}
    config = load_config(arguments.config, os.environ, overrides)

    # What follows imports torch.
    from gateway.journal import set_up_log
    from gateway.tuning import calibration_report as told
    from gateway.tuning.calibrate import (
        Target,
        calibrate,
        certificate,
        default_policy,
        report_paths,
        split,
    )
    from gateway.tuning.machine import runner_for
    from gateway.tuning.policy_file import write_policy
    from gateway.tuning.prompts import file_sha256, read_prompts
    from gateway.tuning.report import html
    from gateway.tuning.saved import Saved
    from gateway.tuning.tape import labelled

    # Results go to stdout, so only trouble is logged.
    set_up_log("warning")
    target = Target(arguments.max_disagreement, arguments.confidence)
    prompts = read_prompts(arguments.prompts)
    parts = split(prompts, arguments.learn, target)
    examples = None if arguments.tape is None else labelled(arguments.tape, hidden=arguments.hidden_state)
    stable = config.policies["stable"] if arguments.config is not None else None
    base = default_policy(arguments.accept, stable)
    # In service load may take away what rides along, and the small model writes that: so it does here.
    with runner_for(config, arguments.rows, arguments.max_tokens, ride_along=False) as machine:
        html_path, png_path, saved_path = report_paths(arguments.out)
        about = {
            "small_hash": machine.served.small_hash,
            "large_hash": machine.served.large_hash,
            "numerics": machine.served.numerics,
            "max_tokens": arguments.max_tokens,
            "hidden_state": arguments.hidden_state,
            "ride_along": False,
        }
        done = calibrate(
            machine.runner,
            Saved(saved_path, about),
            parts,
            base,
            target,
            machine.costs,
            learns=arguments.learn,
            hidden=arguments.hidden_state,
            more_examples=examples,
        )
    lines = (
        f"{len(prompts)} prompts, answers of at most {arguments.max_tokens} tokens, accept rule "
        f"{base.accept}, models {machine.served.small_model} and {machine.served.large_model} "
        f"({machine.served.numerics}).",
    )
    sections = told.sections(done, target, lines)
    png_path.write_bytes(told.png(done, target))
    html_path.write_text(html("Calibration", sections), encoding="utf-8")
    for line in told.table_lines(done):
        print(line)
    for section in sections:
        if section.heading in ("Facts", "Learned router"):
            print("\n".join(section.lines))
            for row in (section.header, *section.rows) if section.header else ():
                print("  ".join(row))
    print(told.verdict(done, target))
    print(f"report {html_path}, plot {png_path}")
    if done.policy is None:
        return 1
    note = certificate(done, machine.served, target, file_sha256(arguments.prompts))
    for path in write_policy(arguments.out, arguments.name, done.policy, note):
        print(f"wrote {path}")
    return 0

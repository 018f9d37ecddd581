"""`tokentape evaluate`: what a policy costs in quality and saves in work, against the large model alone."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.cli_serve import QUIET_OPENMP
from gateway.config import Config, ConfigError, load_config
from gateway.core import Mode
from gateway.policy import Policy

if TYPE_CHECKING:
    from gateway.tuning.evaluation_report import Evaluation


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "evaluate",
        help="quality and cost of a policy against the large model alone",
        description="Answer a task's prompts with the large model alone and under each policy, paired.",
    )
    parser.add_argument(
        "--task", required=True, metavar="T",
        help="humaneval, qa, summary, or JSON lines with `prompt` and perhaps `reference` and `kind`",
    )  # fmt: skip
    parser.add_argument(
        "--policy", action="append", required=True, metavar="A",
        help="a policy of the config, a policy.toml, or small_only; give it again to compare several",
    )  # fmt: skip
    parser.add_argument("--config", type=Path, metavar="F", help="models and policies")
    parser.add_argument("--preset", metavar="P", help="ready model pair: qwen-coder (default) or tiny")
    parser.add_argument("--out", type=Path, metavar="F.html", help="HTML report; JSON goes beside it")
    parser.add_argument("--limit", type=int, metavar="N", help="only the task's first N prompts")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="of an answer (default 256)")
    parser.add_argument("--rows", type=int, default=8, metavar="N", help="prompts side by side (default 8)")
    parser.add_argument(
        "--speed-prompts", type=int, default=0, metavar="N",
        help="also measure tokens/s, one request at a time, on the first N prompts",
    )  # fmt: skip
    parser.add_argument(
        "--allow-code-execution", action="store_true", help="humaneval: run what the models wrote"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and print; 0."""
    for name, value in QUIET_OPENMP.items():
        os.environ.setdefault(name, value)
    for name in ("limit", "max_tokens", "rows"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: at least 1")
    if arguments.out is not None and not arguments.out.absolute().parent.is_dir():
        raise ConfigError(f"--out: there is no folder {arguments.out.absolute().parent}")
    overrides = {} if arguments.preset is None else {"models.preset": arguments.preset}
    config = load_config(arguments.config, os.environ, overrides)
    policies = dict(_policy(name, config) for name in arguments.policy)

    # What follows imports torch.
    from gateway.journal import set_up_log
    from gateway.tuning import evaluation_report as told
    from gateway.tuning.report import html

    # Results go to stdout, so only trouble is logged.
    set_up_log("warning")
    done, about = _evaluate(arguments, config, policies)
    print(told.text(told.policies_table(done)))
    if done.comparisons:
        print()
        print(told.text(told.comparisons_table(done)))
    for result in done.results[1:]:
        print(f"\n{result.name}, by kind of prompt")
        print(told.text(told.groups_table(done, result)))
    if arguments.out is not None:
        lines = [
            f"{about['prompts']} prompts of {done.task.name}, greedy, at most {about['max_tokens']} tokens; "
            f"{about['large_model']} and {about['small_model']} ({about['numerics']})."
        ]
        arguments.out.write_text(html(f"Evaluation: {done.task.name}", told.sections(done, lines)), "utf-8")
        json_path = arguments.out.with_suffix(".json")
        json_path.write_text(json.dumps(told.as_json(done, about), indent=1), "utf-8")
        print(f"\nreport {arguments.out}, numbers {json_path}")
    return 0


def _evaluate(
    arguments: argparse.Namespace, config: Config, policies: dict[str, Policy]
) -> tuple[Evaluation, dict[str, Any]]:
    from gateway.tuning.evaluate import LARGE_ONLY, large_only, measured_speed, run_policy
    from gateway.tuning.evaluation_report import Evaluation
    from gateway.tuning.machine import runner_for
    from gateway.tuning.saved import Saved
    from gateway.tuning.tasks.task import load_task

    task = load_task(arguments.task, allow_code_execution=arguments.allow_code_execution)
    task = replace(task, prompts=task.prompts[: arguments.limit])
    every = {LARGE_ONLY: large_only(), **policies}
    with (
        tempfile.TemporaryDirectory() as folder,
        runner_for(config, arguments.rows, arguments.max_tokens) as machine,
    ):
        beside = Path(folder) / "answers" if arguments.out is None else arguments.out
        served = machine.served
        about = {
            "small_hash": served.small_hash,
            "large_hash": served.large_hash,
            "numerics": served.numerics,
            "max_tokens": arguments.max_tokens,
        }
        saved = Saved(beside.with_suffix(".progress.jsonl"), about)
        results = [
            run_policy(machine.runner, saved, task, machine.tokenizer, name, policy)
            for name, policy in every.items()
        ]
        speed = measured_speed(machine.runner, task, every, arguments.speed_prompts)
        told = {
            **about,
            "small_model": served.small_model,
            "large_model": served.large_model,
            "prompts": len(task.prompts),
        }
        return Evaluation(task, results, machine.costs, speed), told


def _policy(name: str, config: Config) -> tuple[str, Policy]:
    """A policy and what to call it: of the config, a mode, or the one policy of a file."""
    if name == Mode.SMALL_ONLY:
        return name, Policy(mode=Mode.SMALL_ONLY)
    if name in config.policies:
        return name, config.policies[name]
    path = Path(name)
    if not path.is_file():
        known = ", ".join(sorted(config.policies))
        raise ConfigError(f"--policy: {name!r} is neither a policy ({known}), small_only, nor a file")
    found = load_config(path, {})
    names = list(found.policy)
    if len(names) != 1:
        raise ConfigError(f"--policy: {path} holds {len(names)} policies; name it by --config instead")
    return path.stem, found.policies[names[0]]

"""`tokentape bench`: the speed table, as ratios measured in one run."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from gateway.cli_serve import QUIET_OPENMP, Commands
from gateway.config import ConfigError, load_config

WORKLOADS = ("chat", "code", "copy", "long")
MAX_MODEL_LEN = 2048


def add_to(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("bench", help="measure speed against large-only and against peers")
    parser.add_argument("--config", type=Path, metavar="F", help="TOML file whose [models] are measured")
    parser.add_argument("--preset", metavar="P", help="ready model pair: qwen-coder (default) or tiny")
    parser.add_argument("--json", type=Path, metavar="F", help="write every number there")
    parser.add_argument("--plot", type=Path, metavar="F", help="write the ratios as a PNG there")
    parser.add_argument("--workloads", default="chat,code,copy", metavar="W,...", help=", ".join(WORKLOADS))
    parser.add_argument("--rows", default="1,8,32", metavar="N,...", help="rows decoded at a time")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens an answer, instead of the workload's")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="paired rounds (default 3)")
    parser.add_argument("--settings", metavar="S,...", help="only settings whose names contain one of these")
    parser.add_argument("--seed-table", action="store_true", help="the seed method's settings instead")
    parser.add_argument("--peers", action="store_true", help="also measure what one would use instead")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Returns 0."""
    for name, value in QUIET_OPENMP.items():
        os.environ.setdefault(name, value)
    workloads = _named(arguments.workloads, "--workloads", WORKLOADS)
    rows = _numbers(arguments.rows)
    overrides: dict[str, Any] = {"engine.max_rows": max(rows), "engine.max_model_len": MAX_MODEL_LEN}
    if arguments.preset is not None:
        overrides["models.preset"] = arguments.preset
    config = load_config(arguments.config, os.environ, overrides)

    from gateway.bench.runs import Bench
    from gateway.bench.settings import seed_table, standard
    from gateway.bench.table import Line, compare, header, row
    from gateway.bench.workloads import WORKLOADS as PROMPTS
    from gateway.loading import load_pair

    settings = seed_table() if arguments.seed_table else standard()
    if arguments.settings:
        words = arguments.settings.split(",")
        settings = [s for s in settings if any(word in s.name for word in words)]
        if not settings:
            raise ConfigError("--settings: no setting has such a name")
    loaded = load_pair(config, timed=True)
    bench = Bench(loaded, MAX_MODEL_LEN)
    print(f"{loaded.served.small_model} + {loaded.served.large_model}, {loaded.served.numerics}")
    print(header(), flush=True)
    lines: list[Line] = []
    for name in workloads:
        workload = PROMPTS[name]
        for num in rows:
            tokens = arguments.tokens or workload.max_tokens
            lines += compare(
                bench,
                workload,
                num,
                settings,
                arguments.repeats,
                tokens,
                lambda line: print(row(line), flush=True),
            )
    peers = _peers(config, bench, lines) if arguments.peers else {}
    if arguments.json is not None:
        found = {"served": str(loaded.served), "lines": [line.as_dict() for line in lines], "peers": peers}
        arguments.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if arguments.plot is not None:
        from gateway.bench.plot import plot

        plot(lines, arguments.plot)
    return 0


def _peers(config: Any, bench: Any, lines: Any) -> dict[str, float]:
    """tokens/s of each peer on two chat prompts, and how many times that our settings reach at each N."""
    from gateway import presets
    from gateway.bench.peers import Peers, tokens_per_s
    from gateway.bench.settings import LARGE_ONLY
    from gateway.bench.workloads import CHAT

    pair = presets.resolve(config.models)
    peers = Peers(pair.small, pair.large, min(bench.loaded.tokenizer.eos_ids))
    prompts = [list(r.prompt_ids) for r in bench.requests(LARGE_ONLY, CHAT[:2], 1)]
    speeds = {}
    for name, generate in peers.all().items():
        speeds[name] = tokens_per_s(generate, prompts, 48)
        print(f"{name}: {speeds[name]:.2f} tokens/s, one prompt at a time", flush=True)
        for line in (line for line in lines if line.workload == "chat"):
            print(
                f"    N={line.num_rows:<3} {line.setting:24} {line.last.tokens_per_s / speeds[name]:6.1f} x"
            )
    return speeds


def _named(text: str, option: str, known: tuple[str, ...]) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"{option}: {unknown[0]!r} is not one of {', '.join(known)}")
    return names


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--rows: {text!r} is not a list of numbers") from None
    if min(numbers) < 1:
        raise ConfigError("--rows: at least 1")
    return numbers

"""`tokentape bench`: the speed table, as ratios measured in one run."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gateway.cli_serve import QUIET_OPENMP, Commands
from gateway.config import Config, ConfigError, load_config

if TYPE_CHECKING:
    from gateway.bench.runs import Bench, Setting
    from gateway.bench.workloads import Workload
    from gateway.loading import Loaded

L = TypeVar("L")

WORKLOADS = ("chat", "code", "copy", "long")
MAX_MODEL_LEN = 2048
SYNTHETIC_TOKENS = 128
SIZING_PROMPTS = 8
SIZING_TOKENS = 64


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
    parser.add_argument(
        "--peers",
        nargs="?",
        const="",
        metavar="P,...",
        help="also hold settings against what one would use instead: all peers, or those so named",
    )
    parser.add_argument(
        "--gguf", type=Path, metavar="F", help="the large model for llama.cpp, if not the preset's own file"
    )
    parser.add_argument(
        "--synthetic",
        metavar="S:L",
        help="random weights of these sizes instead, as 0.5B:7B; acceptance is scripted",
    )
    parser.add_argument(
        "--agreement", type=float, default=0.85, metavar="X", help="of --synthetic models (default 0.85)"
    )
    parser.add_argument(
        "--tape", action="store_true", help="instead: settings with the tape on, against the same with it off"
    )
    parser.add_argument(
        "--sizing", type=int, metavar="N", help="instead: what N answers at a time take, by the cost model"
    )
    parser.add_argument(
        "--remote-latency", metavar="MS,...", help="instead: the large model behind a network this slow"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Returns 0."""
    for name, value in QUIET_OPENMP.items():
        os.environ.setdefault(name, value)
    if arguments.sizing is not None and arguments.sizing < 1:
        raise ConfigError("--sizing: at least 1")
    rows = _numbers(arguments.rows)
    if arguments.remote_latency is not None:
        from gateway.bench.latency import table

        delays = _numbers(arguments.remote_latency, "--remote-latency", least=0)
        tokens = arguments.tokens or 96
        for line in table(delays, rows, arguments.preset or "tiny", tokens):
            print(line, flush=True)
        return 0
    names = _named(arguments.workloads, "--workloads", WORKLOADS)
    overrides: dict[str, Any] = {"engine.max_rows": max(rows), "engine.max_model_len": MAX_MODEL_LEN}
    if arguments.preset is not None:
        overrides["models.preset"] = arguments.preset
    config = load_config(arguments.config, os.environ, overrides)

    from gateway.bench import floor
    from gateway.bench.plot import plot
    from gateway.bench.runs import Bench
    from gateway.bench.table import Line, compare, header, row

    peers, pairings = _peers(arguments), _pairings(arguments)
    loaded, workloads = _load(arguments, config, names, max(rows))
    bench = Bench(loaded, MAX_MODEL_LEN, ride_along=config.engine.ride_along)
    print(f"{loaded.served.small_model} + {loaded.served.large_model}, {loaded.served.numerics}")
    if arguments.sizing is not None:
        return _sizing(arguments, bench, rows, workloads[0])
    print(header(), flush=True)
    cells = [(w, num, arguments.tokens or w.max_tokens) for w in workloads for num in rows]
    lines: list[Line] = []
    warm = config.models.device == "cuda"
    for workload, num, tokens in cells:
        for against, others in pairings:
            lines += compare(
                bench,
                workload,
                num,
                others,
                arguments.repeats,
                tokens,
                _told(row),
                warm=warm,
                against=against,
            )
    for tier, model in loaded.models.items():
        if loaded.costs is not None and (said := floor.line(tier, model, loaded.costs[tier])) is not None:
            print(said, flush=True)
    held = _hold_against(arguments, config, bench, peers, cells) if peers else []
    if arguments.json is not None:
        found = {"served": str(loaded.served), "lines": [line.as_dict() for line in lines], "peers": held}
        arguments.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if arguments.plot is not None:
        plot(lines, arguments.plot)
    return 0


def _pairings(arguments: argparse.Namespace) -> list[tuple[Setting, list[Setting]]]:
    """What is held against what."""
    from gateway.bench.settings import LARGE_ONLY, everything, taped

    if not arguments.tape:
        return [(LARGE_ONLY, _settings(arguments))]
    chosen = _settings(arguments) if arguments.settings else [LARGE_ONLY, everything()]
    return [(setting, [taped(setting)]) for setting in chosen]


def _settings(arguments: argparse.Namespace) -> list[Setting]:
    from gateway.bench.settings import seed_table, standard

    settings = seed_table() if arguments.seed_table else standard()
    if arguments.settings:
        words = arguments.settings.split(",")
        settings = [s for s in settings if any(word in s.name for word in words)]
        if not settings:
            raise ConfigError("--settings: no setting has such a name")
    return settings


def _sizing(arguments: argparse.Namespace, bench: Bench, rows: list[int], workload: Workload) -> int:
    """The sizing table: shares measured on a few prompts of the workload, passes timed on this machine."""
    from gateway.bench.runs import Setting
    from gateway.bench.sizing import header, line, measured_shares, sizes
    from gateway.policy import Policy

    setting = Setting("exact", Policy(lookup=False))
    prompts, tokens = workload.prompts[:SIZING_PROMPTS], arguments.tokens or SIZING_TOKENS
    shares = measured_shares(bench, setting, prompts, tokens)
    print(
        f"exact without lookup, {workload.name}: {shares.keep:.0%} of {shares.proposals} proposals kept, "
        f"{shares.hit:.0%} of those examined accepted"
    )
    print(header(arguments.sizing))
    assert bench.loaded.costs is not None, "a pair that was loaded to be timed"
    found = list(sizes(bench.loaded.costs, shares, rows, arguments.sizing))
    for size in found:
        print(line(size))
    if arguments.json is not None:
        about = {"shares": asdict(shares), "demand": arguments.sizing, "sizes": [s.as_dict() for s in found]}
        arguments.json.write_text(json.dumps(about, indent=1), encoding="utf-8")
    return 0


def _peers(arguments: argparse.Namespace) -> list[str]:
    from gateway.bench.beside import peers_named

    if arguments.peers is None:
        return []
    if arguments.synthetic is not None:
        raise ConfigError("--peers: no peer can load --synthetic models")
    return peers_named(arguments.peers)


def _load(
    arguments: argparse.Namespace, config: Config, names: list[str], most_rows: int
) -> tuple[Loaded, list[Workload]]:
    """The pair to measure, and on what."""
    from gateway.bench import synthetic
    from gateway.bench.workloads import WORKLOADS as PROMPTS
    from gateway.loading import check_pair, load_pair

    check_pair(config)
    if arguments.synthetic is None:
        return load_pair(config, timed=True), [PROMPTS[name] for name in names]
    if not 0 <= arguments.agreement <= 1:
        raise ConfigError(f"--agreement: {arguments.agreement} is not between 0 and 1")
    shapes = synthetic.parse(arguments.synthetic)
    print(f"SYNTHETIC: random weights; acceptance scripted at {arguments.agreement} by a seeded coin")
    workload = synthetic.workload(most_rows, SYNTHETIC_TOKENS)
    return synthetic.load(config, shapes, arguments.agreement, seed=0), [workload]


def _hold_against(
    arguments: argparse.Namespace,
    config: Config,
    bench: Bench,
    names: list[str],
    cells: list[tuple[Workload, int, int]],
) -> list[dict[str, object]]:
    from gateway import presets
    from gateway.bench.beside import beside, build, peer_header, peer_row
    from gateway.bench.settings import LARGE_ONLY, everything

    def gguf() -> Path | None:
        found: Path | None = arguments.gguf or presets.gguf_of_large(config.models)
        return found

    pair = presets.resolve(config.models)
    peers = build(names, pair, min(bench.loaded.tokenizer.eos_ids), gguf)
    settings = [LARGE_ONLY, *(_settings(arguments) if arguments.settings else [everything()])]
    print(peer_header(), flush=True)
    return [
        line.as_dict()
        for workload, num, tokens in cells
        for line in beside(bench, peers, workload, num, settings, arguments.repeats, tokens, _told(peer_row))
    ]


def _told(row: Callable[[L], str]) -> Callable[[L], None]:
    return lambda line: print(row(line), flush=True)


def _named(text: str, option: str, known: tuple[str, ...]) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"{option}: {unknown[0]!r} is not one of {', '.join(known)}")
    return names


def _numbers(text: str, option: str = "--rows", least: int = 1) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option}: {text!r} is not a list of numbers") from None
    if min(numbers) < least:
        raise ConfigError(f"{option}: at least {least}")
    return numbers

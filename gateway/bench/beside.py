"""The peers that can be had here, each held against our settings on the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from gateway.bench.peers import PeerLine, Peers, Speed, hold_against, in_batches, one_at_a_time
from gateway.bench.runs import Bench, Setting
from gateway.bench.settings import LARGE_ONLY
from gateway.bench.table import LEAST_PROMPTS
from gateway.bench.workloads import Workload
from gateway.config import ConfigError
from gateway.presets import Pair
from gateway.progress import say

HUGGING_FACE = ("HF generate", "HF assisted", "HF prompt lookup", "seed method, minimal")
LLAMA_CPP = ("llama.cpp", "llama.cpp prompt lookup")


def peers_named(words: str) -> list[str]:
    """Peers whose names contain one of the comma-separated words; ConfigError where there is none."""
    names = [n for n in (*HUGGING_FACE, *LLAMA_CPP) if any(word in n for word in words.split(","))]
    if not names:
        raise ConfigError(f"--peers: {words!r} is in no peer's name ({', '.join(HUGGING_FACE + LLAMA_CPP)})")
    return names


def build(
    names: Sequence[str], pair: Pair, pad_token_id: int, gguf: Callable[[], Path | None]
) -> dict[str, Callable[[int], Speed]]:
    """By name, the speed at a number of rows. llama.cpp is left out, with a line, where it is missing."""
    found: dict[str, Callable[[int], Speed]] = {}
    if wanted := [name for name in names if name in HUGGING_FACE]:
        ways = Peers(pair.small, pair.large, pad_token_id).all()
        found |= {name: partial(_at_any, one_at_a_time(ways[name])) for name in wanted}
    if wanted := [name for name in names if name in LLAMA_CPP]:
        file = gguf() if find_spec("llama_cpp") else None
        if file is None:
            say("llama.cpp is left out: it needs the extra `peers` and the large model as GGUF (--gguf)")
            return found
        from gateway.bench.llama_cpp import PromptLookup, Sequences

        if LLAMA_CPP[0] in wanted:
            together = Sequences(file)
            found[LLAMA_CPP[0]] = partial(in_batches, together.generate)
        if LLAMA_CPP[1] in wanted:
            alone = PromptLookup(file)
            found[LLAMA_CPP[1]] = partial(_at_any, one_at_a_time(alone.generate))
    return found


def _at_any(speed: Speed, num_rows: int) -> Speed:
    return speed


def beside(
    bench: Bench,
    peers: dict[str, Callable[[int], Speed]],
    workload: Workload,
    num_rows: int,
    settings: Sequence[Setting],
    repeats: int,
    max_tokens: int,
    told: Callable[[PeerLine], None],
) -> list[PeerLine]:
    """Every setting over every peer on one workload, in paired rounds."""
    prompts = workload.pick(max(num_rows, LEAST_PROMPTS))
    ids = [list(r.prompt_ids) for r in bench.requests(LARGE_ONLY, prompts, 1)]

    def run(setting: Setting) -> float:
        return bench.run(setting, prompts, max_tokens, num_rows).whole_tokens_per_s

    ours = {setting.name: partial(run, setting) for setting in settings}
    lines = []
    for name, speed_at in peers.items():
        speed = speed_at(num_rows)
        theirs, found = hold_against(partial(speed, ids, max_tokens), ours, repeats)
        for setting, ratios in found.items():
            line = PeerLine(workload.name, num_rows, name, theirs, setting, median(ratios), tuple(ratios))
            told(line)
            lines.append(line)
    return lines


def peer_header() -> str:
    """Column names of `peer_row`."""
    return (
        f"{'workload':8} {'N':>3} {'setting':24} {'ratio':>6}   {'peer':24} {'tok/s':>7}   prefill included"
    )


def peer_row(line: PeerLine) -> str:
    """One line for the terminal; tok/s are the peer's."""
    return (
        f"{line.workload:8} {line.num_rows:3d} {line.setting:24} {line.ratio:6.2f}   {line.peer:24} "
        f"{line.peer_tokens_per_s:7.1f}"
    )

"""Times the kernels against this machine's own limits: `python -m gateway.kernels.bench [--json FILE]`.

Weights are random, in the shapes of the default pair. Everything is interleaved in short runs and the
best of them counts, because other programs share the machine.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gateway import kernels

ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 128


@dataclass(frozen=True, slots=True)
class Sizes:
    """A decoder's sizes (Qwen2.5: biased qkv, tied head)."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int = 151936


SHAPES = {
    "0.5B": Sizes(24, 896, 4864, 14, 2, 64),
    "1.5B": Sizes(28, 1536, 8960, 12, 2, 128),
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A random decoder, its caches and the bytes of weights one pass reads."""

    decoder: kernels.Decoder
    sizes: Sizes
    k_cache: list[Tensor]
    v_cache: list[Tensor]
    num_bytes: int

    def step(self, rows: int) -> None:
        """One new token for each of `rows` rows at the bench's context."""
        index = torch.arange(rows)
        positions = torch.full((rows,), CONTEXT)
        tokens = index * 7 % self.sizes.vocab
        self.decoder.forward(tokens, positions, index, index[:, None], self.k_cache, self.v_cache, index)


def random_decoder(sizes: Sizes, seed: int = 0, dtype: torch.dtype = torch.float32) -> Loaded:
    """A decoder with normal weights of standard deviation hidden ** -0.5, and caches of 64 rows."""
    generator = torch.Generator().manual_seed(seed)

    def packed(n: int, k: int) -> kernels.Packed:
        return kernels.quantize_weight(torch.randn(n, k, generator=generator) * k**-0.5)

    def layer() -> kernels.LayerWeights:
        width = sizes.heads * sizes.head_dim
        qkv = width + 2 * sizes.kv_heads * sizes.head_dim
        return kernels.LayerWeights(
            input_norm=torch.ones(sizes.hidden),
            post_norm=torch.ones(sizes.hidden),
            qkv=packed(qkv, sizes.hidden),
            qkv_bias=torch.zeros(qkv),
            o=packed(sizes.hidden, width),
            gate_up=packed(2 * sizes.intermediate, sizes.hidden),
            down=packed(sizes.hidden, sizes.intermediate),
        )

    layers = [layer() for _ in range(sizes.layers)]
    head = packed(sizes.vocab, sizes.hidden)
    shape = kernels.DecoderShape(
        hidden=sizes.hidden,
        intermediate=sizes.intermediate,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        norm_eps=1e-6,
        attention_scale=sizes.head_dim**-0.5,
    )
    frequency = 1e6 ** -(torch.arange(0, sizes.head_dim, 2) / sizes.head_dim)
    angle = torch.arange(CONTEXT + 16)[:, None] * frequency
    decoder = kernels.Decoder(
        shape,
        embed=torch.randn(sizes.vocab, sizes.hidden, generator=generator).bfloat16(),
        cos=angle.cos(),
        sin=angle.sin(),
        final_norm=torch.ones(sizes.hidden),
        head=head,
        layers=layers,
    )
    cache = (max(ROWS), sizes.kv_heads, CONTEXT + 16, sizes.head_dim)
    k_cache, v_cache = ([torch.zeros(cache, dtype=dtype) for _ in layers] for _ in range(2))
    all_packed = [head, *(p for one in layers for p in (one.qkv, one.o, one.gate_up, one.down))]
    return Loaded(decoder, sizes, k_cache, v_cache, sum(p.num_bytes for p in all_packed))


def best_ms(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The least time of each call over interleaved repeats, in milliseconds."""
    best = dict.fromkeys(calls, float("inf"))
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if repeat:  # the first touches memory
                best[name] = min(best[name], (time.perf_counter() - started) * 1e3)
    return best


def stream_gb_s(num_bytes: int = 1_600_000_000, repeats: int = 5) -> float:
    """Read bandwidth of all threads, GB/s: the sum of an array far larger than the caches."""
    array = torch.ones(num_bytes // 8, dtype=torch.int64)
    return num_bytes / best_ms({"sum": array.sum}, repeats)["sum"] / 1e6


def peak_gmac_s(path: str) -> float:
    """The rate of the path's dot-product instruction with operands in registers, GMAC/s, all threads."""
    kernels.use_path(path)
    repeats = 300_000
    done = torch.ops.tokentape.peak(repeats)
    ms = best_ms({"peak": lambda: torch.ops.tokentape.peak(repeats)}, 5)["peak"]
    return float(done) / ms / 1e6


def linear_gmac_s(path: str, rows: int, n: int = 4096, k: int = 1536) -> float:
    """What `int8_linear` reaches on a weight that stays in cache, GMAC/s."""
    kernels.use_path(path)
    packed = kernels.quantize_weight(torch.randn(n, k))
    x = torch.randn(rows, k)
    ms = best_ms({"linear": lambda: kernels.int8_linear(x, packed)}, 10)["linear"]
    return rows * n * k / ms / 1e6


def bf16_linear_ms(sizes: Sizes, rows: int) -> float:
    """All of a model's linear layers by torch in bfloat16: one layer timed, times the number of layers."""
    width = sizes.heads * sizes.head_dim
    qkv = width + 2 * sizes.kv_heads * sizes.head_dim
    shapes = [
        (qkv, sizes.hidden),
        (sizes.hidden, width),
        (2 * sizes.intermediate, sizes.hidden),
        (sizes.hidden, sizes.intermediate),
    ]
    weights = [
        [torch.randn(n, k).bfloat16() for n, k in shapes] for _ in range(6)
    ]  # more than the caches hold
    head = torch.randn(sizes.vocab, sizes.hidden).bfloat16()
    inputs = {k: torch.randn(rows, k).bfloat16() for _, k in shapes}

    def layers() -> None:
        for one in weights:
            for w in one:
                torch.nn.functional.linear(inputs[w.shape[1]], w)

    best = best_ms(
        {"layers": layers, "head": lambda: torch.nn.functional.linear(inputs[sizes.hidden], head)}, 3
    )
    return best["layers"] / len(weights) * sizes.layers + best["head"]


def measure(shapes: list[str], repeats: int, compare: bool) -> dict[str, object]:
    """Every number of the bench, by name."""
    found: dict[str, object] = {"threads": torch.get_num_threads(), "stream_gb_s": stream_gb_s()}
    best_path = kernels.paths()[0]
    arithmetic = {}
    for path in kernels.paths():
        peak = peak_gmac_s(path) if path in ("amx", "vnni") else None
        arithmetic[path] = {"peak_gmac_s": peak, "linear_64_gmac_s": linear_gmac_s(path, 64)}
    found["arithmetic"] = arithmetic
    kernels.use_path(best_path)
    stream = float(str(found["stream_gb_s"]))
    for name in shapes:
        loaded = random_decoder(SHAPES[name])
        calls = {str(rows): functools.partial(loaded.step, rows) for rows in ROWS}
        ms = best_ms(calls, repeats)
        floor = loaded.num_bytes / stream / 1e6
        row: dict[str, object] = {"weight_mb": loaded.num_bytes / 1e6, "floor_ms": floor, "ms": ms}
        row["of_floor"] = {rows: value / floor for rows, value in ms.items()}
        if compare:
            row["bf16_linear_ms"] = {str(rows): bf16_linear_ms(SHAPES[name], rows) for rows in (1, 8, 64)}
        found[name] = row
    return found


def main() -> int:
    """Prints the numbers as JSON; exit 1 where the kernels cannot be built."""
    parser = argparse.ArgumentParser(prog="python -m gateway.kernels.bench", description=__doc__)
    parser.add_argument("--shape", action="append", choices=sorted(SHAPES), help="default: all")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--no-compare", action="store_true", help="leave out torch's bfloat16 linear layers")
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    options = parser.parse_args()
    if not kernels.available():
        return 1
    with torch.inference_mode():
        found = measure(options.shape or sorted(SHAPES), options.repeats, not options.no_compare)
    text = json.dumps(found, indent=1)
    sys.stdout.write(text + "\n")
    if options.json:
        options.json.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

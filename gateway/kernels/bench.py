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
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from gateway import kernels

ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 128


@dataclass(frozen=True, slots=True)
class Sizes:
    """A decoder's sizes (Qwen2.5: biased qkv, tied head) and the bits of its weights in the default pair."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int = 151936
    bits: kernels.Bits = 8


SHAPES = {
    "0.5B": Sizes(24, 896, 4864, 14, 2, 64, bits=4),
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
        return kernels.quantize_weight(torch.randn(n, k, generator=generator) * k**-0.5, sizes.bits)

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


def arithmetic(path: str, n: int = 4096, k: int = 1536) -> dict[str, float | None]:
    """GMAC/s of all threads: the path's dot-product instructions with sums in registers (None for plain C++,
    which has none), and `int8_linear` with 64 rows and a weight that stays in the caches.
    """
    kernels.use_path(path)
    packed = kernels.quantize_weight(torch.randn(n, k))
    x = torch.randn(64, k)
    repeats = 100_000
    done = float(torch.ops.tokentape.peak(repeats))
    calls = {
        "peak": lambda: torch.ops.tokentape.peak(repeats),
        "linear": lambda: kernels.int8_linear(x, packed),
    }
    best = best_ms(calls, 30)
    return {
        "peak": done / best["peak"] / 1e6 if done else None,
        "linear_64": 64 * n * k / best["linear"] / 1e6,
    }


def alternatives_ms(sizes: Sizes, rows: int) -> dict[str, float]:
    """All of a model's linear layers, in milliseconds: by torch in bfloat16, by torch's dynamically quantized
    int8 (per tensor, oneDNN), and by `int8_linear`. One block is timed on weights that no cache holds.
    """
    width = sizes.heads * sizes.head_dim
    shapes = [
        (width + 2 * sizes.kv_heads * sizes.head_dim, sizes.hidden),
        (sizes.hidden, width),
        (2 * sizes.intermediate, sizes.hidden),
        (sizes.hidden, sizes.intermediate),
    ]
    copies = 6
    plain = [torch.randn(n, k) for n, k in shapes * copies]
    bf16 = [w.bfloat16() for w in plain]
    packed = [kernels.quantize_weight(w, sizes.bits) for w in bf16]
    torch_int8 = [
        torch.ops.quantized.linear_prepack(
            torch.quantize_per_channel(
                w, w.abs().amax(1) / 127, torch.zeros(len(w), dtype=torch.int64), 0, torch.qint8
            ),
            None,
        )
        for w in plain
    ]
    x = {k: torch.randn(rows, k) for _, k in shapes}
    x16 = {k: v.bfloat16() for k, v in x.items()}
    calls = {
        "torch bf16": lambda: [nn.functional.linear(x16[w.shape[1]], w) for w in bf16],
        "torch int8 dynamic": lambda: [
            torch.ops.quantized.linear_dynamic(x[k], w, True)
            for w, (_, k) in zip(torch_int8, shapes * copies, strict=True)
        ],
        "int8_linear": lambda: [kernels.int8_linear(x[w.k], w) for w in packed],
    }
    return {name: ms / copies * sizes.layers for name, ms in best_ms(calls, 5).items()}


def measure(shapes: list[str], repeats: int, compare: bool) -> dict[str, object]:
    """Every number of the bench, by name."""
    found: dict[str, object] = {"threads": torch.get_num_threads()}
    found["gmac_s"] = {path: arithmetic(path) for path in kernels.paths()}
    kernels.use_path(kernels.paths()[0])
    for name in shapes:
        loaded = random_decoder(SHAPES[name])
        weights = torch.empty(loaded.num_bytes, dtype=torch.uint8).fill_(1)
        calls: dict[str, Callable[[], object]] = {
            str(rows): functools.partial(loaded.step, rows) for rows in ROWS
        }
        calls["floor"] = functools.partial(torch.ops.tokentape.read, weights)
        ms = best_ms(calls, repeats)
        row: dict[str, object] = {"weight_mb": loaded.num_bytes / 1e6, "ms": ms}
        row["stream_gb_s"] = loaded.num_bytes / ms["floor"] / 1e6
        row["of_floor"] = {rows: value / ms["floor"] for rows, value in ms.items()}
        if compare:
            row["layers_ms"] = {str(rows): alternatives_ms(SHAPES[name], rows) for rows in (1, 8, 64)}
        found[name] = row
    return found


def main() -> int:
    """Prints the numbers as JSON; exit 1 where the kernels cannot be built."""
    parser = argparse.ArgumentParser(prog="python -m gateway.kernels.bench", description=__doc__)
    parser.add_argument("--shape", action="append", choices=sorted(SHAPES), help="default: all")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--no-compare", action="store_true", help="leave out torch's own linear layers")
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    options = parser.parse_args()
    if not kernels.available():
        return 1
    warnings.filterwarnings("ignore", message="torch.quantize_per_tensor")  # deprecated, but the peer to beat
    with torch.inference_mode():
        found = measure(options.shape or sorted(SHAPES), options.repeats, not options.no_compare)
    text = json.dumps(found, indent=1)
    sys.stdout.write(text + "\n")
    if options.json:
        options.json.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

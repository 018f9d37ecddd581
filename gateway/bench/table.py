"""Paired ratios: every run of a setting stands between two runs of another, on the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from gateway.bench.runs import Bench, Measured, Setting
from gateway.bench.settings import LARGE_ONLY
from gateway.bench.workloads import Workload

LEAST_PROMPTS = 4
"""Prompts of a run, one after the other where fewer rows decode at a time: one prompt alone says little."""


@dataclass(frozen=True, slots=True)
class Line:
    """One setting on one workload at one number of rows; ratio: median of tokens/s over the other's."""

    workload: str
    num_rows: int
    setting: str
    ratio: float
    ratios: tuple[float, ...]
    last: Measured

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "workload": self.workload,
            "num_rows": self.num_rows,
            "setting": self.setting,
            "ratio": self.ratio,
            "ratios": list(self.ratios),
            **self.last.as_dict(),
        }


def compare(
    bench: Bench,
    workload: Workload,
    num_rows: int,
    settings: Sequence[Setting],
    repeats: int,
    max_tokens: int,
    told: Callable[[Line], None],
    *,
    warm: bool = False,
    against: Setting = LARGE_ONLY,
) -> list[Line]:
    """A B A B ...: `against` between all others, `repeats` rounds; the first line is `against` itself.

    warm: run everything once before, unmeasured, so that no CUDA graph is captured in a measured run.
    """
    prompts = workload.pick(max(num_rows, LEAST_PROMPTS))
    if warm:
        for setting in (against, *settings):
            bench.run(setting, prompts, max_tokens, num_rows)
    ratios: dict[str, list[float]] = {s.name: [] for s in settings}
    last: dict[str, Measured] = {}
    alone = [bench.run(against, prompts, max_tokens, num_rows)]
    for _ in range(repeats):
        for setting in settings:
            last[setting.name] = bench.run(setting, prompts, max_tokens, num_rows)
            alone.append(bench.run(against, prompts, max_tokens, num_rows))
            beside = (alone[-2].tokens_per_s + alone[-1].tokens_per_s) / 2
            ratios[setting.name].append(last[setting.name].tokens_per_s / beside)
    typical = sorted(alone, key=lambda m: m.tokens_per_s)[len(alone) // 2]
    lines = [Line(workload.name, num_rows, against.name, 1.0, (1.0,), typical)]
    lines += [
        Line(workload.name, num_rows, name, median(values), tuple(values), last[name])
        for name, values in ratios.items()
    ]
    for line in lines:
        told(line)
    return lines


def header() -> str:
    """Column names of `row`."""
    return (
        f"{'workload':8} {'N':>3} {'setting':27} {'ratio':>6} {'tok/s':>7} {'TTFT':>7} {'p50':>6} {'p99':>7} "
        f"{'small':>6} {'lookup':>6} {'accept':>6} {'agree':>6} {'host':>6}"
    )


def row(line: Line) -> str:
    """One line for the terminal; times in ms."""
    m = line.last
    share = [f"{x:6.3f}" if x is not None else "     -" for x in (m.acceptance, m.agreement)]
    return (
        f"{line.workload:8} {line.num_rows:3d} {line.setting:27} {line.ratio:6.2f} {m.tokens_per_s:7.1f} "
        f"{m.ttft_ms:7.0f} {m.itl_p50_ms:6.1f} {m.itl_p99_ms:7.1f} "
        f"{m.small_share:6.2f} {m.lookup_share:6.2f} "
        f"{share[0]} {share[1]} {m.host_share:6.3f}{'  adapted' if m.adapted else ''}"
    )

"""The table as a picture: ratio over large-only by setting, one panel a workload."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from gateway.bench.table import Line

OKABE_ITO = ("#0072B2", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#56B4E9")


def plot(lines: Sequence[Line], file: Path) -> None:
    """Write a PNG."""
    workloads = list(dict.fromkeys(line.workload for line in lines))
    rows = sorted({line.num_rows for line in lines})
    settings = [name for name in dict.fromkeys(line.setting for line in lines) if name != "large-only"]
    figure = Figure(figsize=(4.2 * len(workloads), 0.45 * len(settings) + 1.8), layout="constrained")
    panels = figure.subplots(1, len(workloads), sharey=True, squeeze=False)[0]
    height = 0.8 / len(rows)
    for panel, workload in zip(panels, workloads, strict=True):
        for j, num in enumerate(rows):
            ratio = {x.setting: x.ratio for x in lines if (x.workload, x.num_rows) == (workload, num)}
            at = [i + (j - (len(rows) - 1) / 2) * height for i in range(len(settings))]
            values = [ratio.get(name, 0.0) for name in settings]
            panel.barh(at, values, height, label=f"N = {num}", color=OKABE_ITO[j % len(OKABE_ITO)])
        panel.axvline(1.0, color="black", linewidth=1)
        panel.set_yticks(range(len(settings)), settings)
        panel.set_title(workload)
        panel.set_xlabel("tokens/s over large-only")
    panels[0].invert_yaxis()
    panels[-1].legend()
    figure.savefig(file, dpi=150)

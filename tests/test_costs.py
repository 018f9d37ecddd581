"""Pass costs: measured once, kept on disk, measured anew for other weights."""

from pathlib import Path

import torch

from gateway.core import Tier
from gateway.costs import SIZES, costs_of, measure
from gateway.layout import Feed, Forward


class Counting:
    """A model that counts its passes and their sizes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def forward(self, feeds: list[Feed]) -> Forward:
        self.sizes.append(sum(len(feed.tokens) for feed in feeds))
        return Forward(torch.zeros(1, 1), torch.zeros(1))


def test_measured_once_and_then_read(tmp_path: Path) -> None:
    model = Counting()
    pair = {Tier.SMALL: model, Tier.LARGE: model}
    first = costs_of(pair, (0,), 40, "weights a", tmp_path)
    assert first[Tier.SMALL].tokens == (1, 2, 4, 8, 16, 32)
    num = len(model.sizes)
    assert costs_of(pair, (0,), 40, "weights a", tmp_path) == first
    assert len(model.sizes) == num
    costs_of(pair, (0,), 40, "weights b", tmp_path)
    assert len(model.sizes) == 2 * num
    assert max(model.sizes) <= 40 < SIZES[-1]


def test_a_broken_file_is_measured_again(tmp_path: Path) -> None:
    pair = {Tier.SMALL: Counting(), Tier.LARGE: Counting()}
    costs_of(pair, (0,), 8, "weights", tmp_path)
    (file,) = (tmp_path / "costs").iterdir()
    file.write_text("{")
    assert costs_of(pair, (0,), 8, "weights", tmp_path)[Tier.LARGE].tokens == (1, 2, 4, 8)


def test_the_least_counts_and_never_falls_with_size() -> None:
    times = {1: iter([99.0, 9.0, 9.0, 8.0, 9.0, 9.0]), 2: iter([7.0, 3.0, 9.0, 9.0, 9.0, 9.0])}
    tables = measure(lambda tier, num: next(times[num]) if tier is Tier.SMALL else 1.0, (1, 2))
    assert tables[Tier.SMALL].ms == (3.0, 3.0)

"""Summaries of logits against closed forms, and the kernels' against numpy in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from gateway import kernels
from gateway.summary import Summarize, by_kernels, by_torch

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="no C++ compiler")
WAYS = [pytest.param(by_torch, id="torch"), pytest.param(by_kernels, id="kernels", marks=needs_kernels)]


def logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return 4 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("summarize", WAYS)
@pytest.mark.parametrize("vocab", [5, 16, 63, 64, 1000, 151_665])
def test_summary_is_numpys(summarize: Summarize, vocab: int) -> None:
    given = logits(3, vocab)
    said = summarize(given, 5)
    x = given.double().numpy()
    norm = np.logaddexp.reduce(x, axis=1)
    p = np.exp(x - norm[:, None])
    order = np.argsort(-x, axis=1, kind="stable")[:, :5]
    assert said.ids.tolist() == order.tolist()
    assert said.top.tolist() == np.take_along_axis(x, order, 1).tolist()
    assert said.argmax.tolist() == order[:, 0].tolist()
    assert said.norm.numpy() == pytest.approx(norm, abs=2e-6)
    assert said.entropy.numpy() == pytest.approx(-(p * np.log(p)).sum(1), abs=2e-5)


@pytest.mark.parametrize("summarize", WAYS)
def test_uniform_and_certain_rows_have_their_closed_forms(summarize: Summarize) -> None:
    given = torch.zeros(2, 4096)
    given[1] = -math.inf
    given[1, 77] = 3.0
    said = summarize(given, 2)
    assert said.norm.tolist() == pytest.approx([math.log(4096), 3.0], abs=1e-6)
    assert said.entropy.tolist() == pytest.approx([math.log(4096), 0.0], abs=1e-6)
    assert said.argmax.tolist() == [0, 77]


@needs_kernels
def test_kernels_put_equal_logits_in_the_order_of_their_ids() -> None:
    given = torch.zeros(1, 500)
    given[0, [450, 31, 200]] = 5.0
    assert by_kernels(given, 5).ids.tolist() == [[31, 200, 450, 0, 1]]


@needs_kernels
@pytest.mark.parametrize("path", kernels.paths() if kernels.available() else [])
def test_a_row_has_the_same_summary_on_every_path_and_among_any_neighbours(path: str) -> None:
    given = logits(9, 2000, seed=1)
    # A cut of a padded head: rows that are not next to each other.
    kernels.use_path("portable")
    plain = by_kernels(given[:, :1990], 20)
    kernels.use_path(path)
    try:
        together = by_kernels(given[:, :1990], 20)
        alone = [by_kernels(given[i : i + 1, :1990], 20) for i in range(9)]
    finally:
        kernels.use_path(kernels.paths()[0])
    for field, name in enumerate(plain._fields):
        assert torch.equal(together[field], plain[field]), name
        assert torch.equal(torch.cat([row[field] for row in alone]), plain[field]), name


@needs_kernels
@pytest.mark.parametrize("k", [0, 65, 11])
def test_kernels_refuse_a_k_they_have_no_room_for(k: int) -> None:
    with pytest.raises(RuntimeError, match=f"k is {k}"):
        by_kernels(torch.zeros(1, 10), k)

"""The speed table's own arithmetic, on `tiny`: what is counted is what was written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gateway.bench.peers import Peers, tokens_per_s
from gateway.bench.plot import plot
from gateway.bench.runs import Bench, Setting
from gateway.bench.settings import LARGE_ONLY, seed_table, standard
from gateway.bench.table import Line, compare, header, row
from gateway.bench.workloads import WORKLOADS
from gateway.core import Accept
from gateway.loading import Loaded
from gateway.policy import Policy
from gateway.request import Served

if TYPE_CHECKING:
    from tiny_pair import TinyPair


@pytest.fixture(scope="module")
def bench(tiny_pair: TinyPair) -> Bench:
    engine = tiny_pair.engine()
    served = Served("tiny/small", "tiny/large", "a", "b", "cpu/float32/none", "test")
    pool = engine.pool
    loaded = Loaded(
        tiny_pair.small, tiny_pair.large, tiny_pair.tokenizer, pool.num_blocks, pool.block_size, served, None
    )
    return Bench(loaded, engine.max_model_len)


def test_a_run_counts_what_was_written(bench: Bench) -> None:
    found = bench.run(Setting("exact", Policy(accept=Accept.EXACT)), ["hello", "world", "again"], 24)
    assert found.tokens == 3 * 24
    assert found.small_share + found.large_share + found.lookup_share == pytest.approx(1.0)
    assert found.agreement == 1.0
    assert found.large_share >= 10 / 24
    alone = bench.run(LARGE_ONLY, ["hello"], 8)
    assert (alone.large_share, alone.large_passes, alone.small_passes, alone.agreement) == (1.0, 8, 0, None)


def test_ratios_are_against_large_only_beside_them(bench: Bench) -> None:
    told: list[Line] = []
    settings = [standard()[0], seed_table()[0]]
    lines = compare(bench, WORKLOADS["chat"], 2, settings, 2, 12, told.append)
    assert [line.setting for line in lines] == ["large-only", "small-only", "conservative"]
    assert told == lines
    assert all(len(line.ratios) == 2 and line.ratio > 0 for line in lines[1:])
    assert len(row(lines[0]).split()) >= len(header().split()) - 1


def test_the_plot_is_a_picture(bench: Bench, tmp_path: Path) -> None:
    lines = compare(bench, WORKLOADS["code"], 1, standard()[:2], 1, 12, lambda line: None)
    plot(lines, tmp_path / "ratios.png")
    assert (tmp_path / "ratios.png").read_bytes().startswith(b"\x89PNG")


def test_the_seed_methods_minimal_implementation_is_trust_without_guards(
    tiny_pair: TinyPair, bench: Bench
) -> None:
    """Both write the small model's token from a gap of .5 on and the large model's otherwise."""
    peers = Peers(tiny_pair.folder / "small", tiny_pair.folder / "large", 0)
    for model in (peers.small, peers.large):
        model.float()
    policy = Policy(accept=Accept.TRUST, lookup=False, loop_limit=0)
    (request,) = bench.requests(Setting("trust", policy), ["hello there"], 30)
    engine = bench.loaded.engine(tiny_pair.engine().scheduler, 1, bench.max_model_len)
    engine.add(request)
    ours: list[int] = []
    while not engine.idle:
        ours += [step.token_id for delta in engine.tick().deltas for step in delta.steps]
    generate = peers.all()["seed method, minimal"]
    assert tokens_per_s(generate, [list(request.prompt_ids)], 4) > 0
    theirs = generate(list(request.prompt_ids), 30)
    # bfloat16 weights made float again differ a little from the originals: texts agree up to a near tie.
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), 30)
    assert same >= 12

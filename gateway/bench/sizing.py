"""How many gateways and replicas of the large model a load takes: the cost model, told as a table.

A round of drafts keeps the small model busy, then the large one. Where both run on the gateway's own machine,
that machine is multiplied; where the large model runs elsewhere, one replica serves as many gateways as its
share of a round leaves room for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from gateway.bench.runs import Bench, Setting
from gateway.core import Outcome, Reason, Tick, Tier
from gateway.load import CostTable, Load

_EXAMINED = frozenset({Outcome.ACCEPTED, Outcome.REJECTED})


@dataclass(frozen=True, slots=True)
class Shares:
    """What was seen of drafts: keep, the share of proposals kept; hit, that of examined ones that stood."""

    keep: float
    hit: float
    proposals: int


@dataclass(frozen=True, slots=True)
class Size:
    """One line: a gateway that decodes so many rows at a time, and how many of them the demand takes.

    small_share: of the tokens. tokens_per_s: of one gateway; per_row: of one row. large_busy: share of the
    time the large model works for one gateway. gateways, replicas: for the demand; replicas of the large
    model count where it runs elsewhere.
    """

    rows: int
    drafts: int
    small_share: float
    tokens_per_s: float
    per_row: float
    large_busy: float
    gateways: int
    replicas: int

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def measured_shares(bench: Bench, setting: Setting, prompts: Sequence[str], max_tokens: int) -> Shares:
    """The shares on these prompts, drafts not capped by their worth."""
    proposed = kept = examined = stood = 0

    def see(tick: Tick) -> None:
        nonlocal proposed, kept, examined, stood
        for step in tick.steps:
            if step.reason in (Reason.CONFIDENT, Reason.LOW_CONFIDENCE):
                proposed += 1
                kept += step.reason is Reason.CONFIDENT
            if step.tier is Tier.SMALL and step.outcome in _EXAMINED:
                examined += 1
                stood += step.outcome is Outcome.ACCEPTED

    bench.run(Setting(setting.name, setting.policy, adapt=False), prompts, max_tokens, on_tick=see)
    return Shares(kept / proposed if proposed else 0.0, stood / examined if examined else 0.0, proposed)


def sizes(
    costs: Mapping[Tier, CostTable], shares: Shares, rows: Sequence[int], demand: int
) -> Iterator[Size]:
    """A line for each number of rows; demand: answers decoded at a time, over all gateways."""
    load = Load(costs)
    load.keep, load.hit = shares.keep, shares.hit
    for num in rows:
        best = max((load.large_only(num), *load.rounds(num)), key=lambda expected: expected.per_ms)
        busy = best.large_ms / (best.small_ms + best.large_ms)
        gateways = math.ceil(demand / num)
        yield Size(
            rows=num,
            drafts=best.drafts,
            small_share=1 - 1 / best.tokens,
            tokens_per_s=best.per_ms * 1000 * num,
            per_row=best.per_ms * 1000,
            large_busy=busy,
            gateways=gateways,
            # A hair below a whole number is that number: sums of milliseconds are not exact.
            replicas=math.ceil(gateways * busy - 1e-9),
        )


def header(demand: int) -> str:
    """The first lines of the table."""
    return (
        f"for {demand} answers at a time\n"
        "| rows a gateway | drafts | small model's share | tokens/s a gateway | tokens/s a row "
        "| large model busy | gateways | large replicas |\n| " + " | ".join(["---"] * 8) + " |"
    )


def line(size: Size) -> str:
    """One line of the table."""
    cells = (
        str(size.rows), str(size.drafts), f"{size.small_share:.0%}", f"{size.tokens_per_s:.0f}",
        f"{size.per_row:.1f}", f"{size.large_busy:.0%}", str(size.gateways), str(size.replicas),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"

"""One measured run of prompts through an engine, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass

from gateway.bench.taped import recording
from gateway.config import EngineConfig
from gateway.core import Sampling, Tick, Tier
from gateway.loading import Loaded
from gateway.policy import Policy
from gateway.prefix import PrefixCache
from gateway.request import Request
from gateway.scheduler import Scheduler

LARGE_WAIT_S = EngineConfig().large_wait_ms / 1000
PREFILL_CHUNK = 256


@dataclass(frozen=True, slots=True)
class Setting:
    """A named way to serve: a policy, whether drafts are capped by their worth, whether a tape is written."""

    name: str
    policy: Policy
    adapt: bool = True
    tape: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """Tokens per second over the decoding phase and what the tape says of it.

    seconds: from when all rows that run at a time have a first token to the end, so that prefill is apart.
    ttft_ms: median over rows.
    itl_p50_ms, itl_p99_ms: time between a row's releases divided by their tokens. agreement: share of tokens
    not written by the large model that are its own choice. host_share: share of the seconds outside the
    model passes, each of which lasts until its logits are read.
    whole_tokens_per_s: over the whole run, prefill included: what peers are held against.
    """

    tokens_per_s: float
    whole_tokens_per_s: float
    seconds: float
    tokens: int
    ttft_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    small_share: float
    large_share: float
    lookup_share: float
    acceptance: float | None
    agreement: float | None
    large_passes: int
    small_passes: int
    host_share: float
    adapted: bool

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


class Bench:
    """Runs settings over one loaded pair, as the gateway would but for earlier answers; a new engine each
    time, so that a run finds nothing of another. ride_along: None: as the gateway's default."""

    def __init__(self, loaded: Loaded, max_model_len: int, *, ride_along: bool | None = None) -> None:
        self.loaded = loaded
        self.ride_along = ride_along
        self.max_model_len = max_model_len

    def requests(self, setting: Setting, prompts: Sequence[str], max_tokens: int) -> list[Request]:
        """One greedy request a prompt; answers run to max_tokens, so that every run does the same work."""
        tokenizer = self.loaded.tokenizer
        return [
            Request(
                id=f"bench-{i}",
                choice=0,
                prompt_ids=tuple(tokenizer.chat([{"role": "user", "content": prompt}])),
                sampling=Sampling(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True),
                policy=setting.policy,
                policy_name=setting.name,
                received=time.time(),
            )
            for i, prompt in enumerate(prompts)
        ]

    def run(
        self,
        setting: Setting,
        prompts: Sequence[str],
        max_tokens: int,
        num_rows: int | None = None,
        on_tick: Callable[[Tick], None] = lambda _: None,
    ) -> Measured:
        """All prompts to the end, num_rows at a time (by default all at once); on_tick sees every tick."""
        most_rows = num_rows or len(prompts)
        engine = self.loaded.engine(
            Scheduler(LARGE_WAIT_S, PREFILL_CHUNK),
            most_rows,
            self.max_model_len,
            load=self.loaded.load(ride_along=self.ride_along) if setting.adapt else None,
            ride_along=self.ride_along,
            prefixes=PrefixCache(EngineConfig().prefix_slots),
        )
        requests = self.requests(setting, prompts, max_tokens)
        with recording(self.loaded.served, requests) if setting.tape else nullcontext() as record:
            for request in requests:
                engine.check(request)
                engine.add(request)
            gathered = _Gathered(time.perf_counter(), min(most_rows, len(prompts)))
            while not engine.idle:
                tick = engine.tick()
                if record is not None:
                    record(tick)
                gathered.take(tick, time.perf_counter())
                on_tick(tick)
        return gathered.measured()


class _Gathered:
    def __init__(self, began: float, num_rows: int) -> None:
        self.began = began
        self.num_rows = num_rows
        self.start: float | None = None
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.gaps: list[float] = []
        self.ended = began
        self.written = {tier: 0 for tier in Tier}
        self.passes = {tier: 0 for tier in Tier}
        self.labels: dict[tuple[str, int], bool] = {}
        self.drafted = self.accepted = 0
        self.pass_ms = 0.0
        self.early = 0
        self.adapted = False

    def take(self, tick: Tick, now: float) -> None:
        if tick.passed is not None:
            self.passes[tick.passed.tier] += 1
            self.adapted |= tick.passed.adapted
            if self.start is not None:
                self.pass_ms += tick.passed.ms
        for delta in tick.deltas:
            num = len(delta.steps)
            if delta.request_id in self.last and num:
                self.gaps += [(now - self.last[delta.request_id]) * 1e3 / num] * num
            self.early += num if self.start is None else 0
            self.first.setdefault(delta.request_id, now)
            self.last[delta.request_id] = self.ended = now
            for step in delta.steps:
                self.written[step.tier] += 1
            if delta.finished is not None:
                self.drafted += delta.finished.counts.num_draft_tokens
                self.accepted += delta.finished.counts.num_accepted_draft_tokens
        if self.start is None and len(self.first) == self.num_rows:
            self.start = now
        for step in (*tick.steps, *tick.restated):
            if step.written and step.tier is not Tier.LARGE and step.large_choice is not None:
                self.labels[step.request_id, step.seq] = step.token_id == step.large_choice

    def measured(self) -> Measured:
        tokens = sum(self.written.values())
        assert self.start is not None, "every row has a first token"
        seconds = self.ended - self.start
        gaps = sorted(self.gaps)
        ttft = sorted((at - self.began) * 1e3 for at in self.first.values())
        return Measured(
            tokens_per_s=(tokens - self.early) / seconds,
            whole_tokens_per_s=tokens / (self.ended - self.began),
            seconds=seconds,
            tokens=tokens,
            ttft_ms=ttft[len(ttft) // 2],
            itl_p50_ms=gaps[len(gaps) // 2],
            itl_p99_ms=gaps[int(len(gaps) * 0.99)],
            small_share=self.written[Tier.SMALL] / tokens,
            large_share=self.written[Tier.LARGE] / tokens,
            lookup_share=self.written[Tier.LOOKUP] / tokens,
            acceptance=self.accepted / self.drafted if self.drafted else None,
            agreement=sum(self.labels.values()) / len(self.labels) if self.labels else None,
            large_passes=self.passes[Tier.LARGE],
            small_passes=self.passes[Tier.SMALL],
            host_share=max(0.0, 1 - self.pass_ms / 1e3 / seconds),
            adapted=self.adapted,
        )

"""Drafting ahead of the policy, and the padded buckets it runs on: the same tokens and decisions as step by
step, from fewer passes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from fakes import ask_for, decode
from recorded import RecordedDecoder
from transformers import AutoModelForCausalLM

from gateway.ahead import Ahead
from gateway.cache import BlockPool
from gateway.core import Accept, Mode, Tier
from gateway.engine import Engine
from gateway.local import local_tiers
from gateway.models import CausalLM
from gateway.policy import Policy
from gateway.request import Request
from gateway.router import Router
from gateway.sampling import Ask
from gateway.scheduler import Scheduler
from gateway.static_decoder import StaticDecoder
from gateway.tier import Job, Scorer
from gateway.tiny import HIDDEN
from gateway.torch_decoder import TorchDecoder

if TYPE_CHECKING:
    from tiny_pair import TinyPair

BLOCKS, BLOCK = 48, 32
"""Pages small enough that answers go over several."""


def load(tiny_pair: TinyPair, decoder: type[TorchDecoder]) -> dict[Tier, CausalLM]:
    found = {}
    for tier in (Tier.SMALL, Tier.LARGE):
        hf: Any = AutoModelForCausalLM.from_pretrained(tiny_pair.folder / tier, local_files_only=True)
        found[tier] = CausalLM(decoder(hf))
        found[tier].allocate(BLOCKS, BLOCK)
    return found


@pytest.fixture(scope="module")
def models(tiny_pair: TinyPair) -> dict[Tier, CausalLM]:
    return load(tiny_pair, StaticDecoder)


def engine(tiny_pair: TinyPair, tiers: dict[Tier, Scorer]) -> Engine:
    pool = BlockPool(BLOCKS, BLOCK)
    return Engine(tiers, tiny_pair.tokenizer, pool, Scheduler(0.0, 64), max_rows=16, max_model_len=160)


POLICIES = {
    "exact": Policy(protect_first=2),
    "keeps all": Policy(protect_first=0, threshold=0.0, draft_length=8, lookup=False),
    "trust": Policy(accept=Accept.TRUST, protect_first=3, lookup=False),
    "threshold": Policy(accept=Accept.THRESHOLD, threshold=0.3, draft_length=3),
    "small only": Policy(mode=Mode.SMALL_ONLY),
    "shadow": Policy(mode=Mode.SHADOW),
    "penalised": Policy(small_repetition_penalty=1.3),
    "probing": Policy(
        router=Router((0.0,) * 9, (1.0,) * 9, (), (), (*(0.0,) * 8, 1.0), 0.0, (0.0625,) * HIDDEN)
    ),
}


def requests() -> list[Request]:
    greedy = [
        ask_for(name, tuple(name.encode()), policy=policy, max_tokens=50, ignore_eos=True)
        for name, policy in POLICIES.items()
    ]
    sampled = ask_for("sampled", (65, 66, 67), policy=POLICIES["exact"], max_tokens=50, temperature=0.8)
    long = ask_for("long", tuple(range(32, 122)), policy=POLICIES["exact"], max_tokens=70, ignore_eos=True)
    return [*greedy, sampled, long]


def test_drafting_ahead_changes_no_token_and_no_decision(
    tiny_pair: TinyPair, models: dict[Tier, CausalLM]
) -> None:
    step_by_step = decode(engine(tiny_pair, {**local_tiers(load(tiny_pair, TorchDecoder))}), requests())
    ahead = Ahead(models[Tier.SMALL], tiny_pair.large.vocab_size)
    tiers: dict[Tier, Scorer] = {**local_tiers(models), Tier.SMALL: ahead}
    drafted = decode(engine(tiny_pair, tiers), requests())
    for key, expected in step_by_step.items():
        for was, now in zip(expected.tape, drafted[key].tape, strict=True):
            same = ("token_id", "idx", "tier", "action", "reason", "outcome", "small_choice", "large_choice")
            assert [getattr(now, f) for f in same] == [getattr(was, f) for f in same], key
            if was.signals is not None:
                assert now.signals is not None
                assert now.signals.gap == pytest.approx(was.signals.gap, abs=1e-4)
                assert now.signals.attn_entropy == pytest.approx(was.signals.attn_entropy, abs=1e-4)


def test_a_kept_draft_takes_one_pass_of_the_model(
    tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = load(tiny_pair, RecordedDecoder)
    calls = []
    for name in ("draft", "forward"):
        real = getattr(models[Tier.SMALL], name)
        note = lambda *args, name=name, real=real: calls.append(name) or real(*args)  # noqa: E731
        monkeypatch.setattr(models[Tier.SMALL], name, note)
    ahead = Ahead(models[Tier.SMALL], tiny_pair.large.vocab_size, steps=2)
    tiers: dict[Tier, Scorer] = {**local_tiers(models), Tier.SMALL: ahead}
    ask = ask_for("s", (72, 105), policy=Policy(mode=Mode.SMALL_ONLY), max_tokens=15, ignore_eos=True)
    answer = decode(engine(tiny_pair, tiers), [ask])["s", 0]
    assert calls == ["draft"] * 5  # one token asked for and two ahead, each time
    plain = engine(tiny_pair, {**local_tiers(load(tiny_pair, TorchDecoder))})
    assert answer.tokens == decode(plain, [ask])["s", 0].tokens


def test_what_was_drafted_is_no_answer_to_another_row_or_another_token(
    tiny_pair: TinyPair, models: dict[Tier, CausalLM]
) -> None:
    ahead = Ahead(models[Tier.SMALL], tiny_pair.large.vocab_size)
    plain = local_tiers(models)[Tier.SMALL]
    sequence = [72, 101, 108]

    def job(request_id: str, start: int, end: int) -> Job:
        return Job(request_id, 0, sequence, start, end, [ask(end)], (3, 4))

    def ask(position: int) -> Ask:
        return Ask(ask_for().sampling, 0, position, (), (), 2)

    (first,) = ahead.score([job("a", 0, 3)]).readings[0]
    sequence.append((first.token + 1) % 256)
    other = ahead.score([job("a", 3, 4)])
    assert other.ms > 0
    assert other.readings[0][0].token == plain.score([job("a", 3, 4)]).readings[0][0].token
    sequence[3] = first.token
    assert ahead.score([job("a", 3, 4)]).ms > 0, "the other token's draft had taken the place"
    ahead.score([job("a", 0, 3)])
    assert ahead.score([job("b", 3, 4)]).ms > 0, "another request holds these blocks now"
    ahead.score([job("a", 0, 3)])
    assert ahead.score([job("a", 3, 4)]).ms == 0

"""A model of this process behind the tier interface: each job gets its own readings, of its own tokens."""

from __future__ import annotations

import math

from fakes import ScriptedModel, ask_for, noise_logits

from gateway.core import Tier
from gateway.local import local_tiers
from gateway.sampling import Ask
from gateway.tier import Job

LOGITS = noise_logits(3, 8)


def ask(position: int, draft: int | None = None) -> Ask:
    return Ask(ask_for().sampling, 0, position, (), (), 2, draft)


def job(sequence: list[int], start: int, end: int, asks: list[Ask], block: int = 0) -> Job:
    return Job("r", 0, sequence, start, end, asks, (block,))


def test_a_job_is_a_prefix_and_a_draft_with_one_ask_more_than_drafted_tokens() -> None:
    asks = [ask(0, 4), ask(1, 5), ask(2)]
    verifying = job([1, 2, 3, 4, 5, 6], 2, 5, asks)
    assert (verifying.prefix, verifying.draft) == ([1, 2, 3], [4, 5])
    assert verifying.tokens == [3, 4, 5]
    prefilling = job([1, 2, 3, 4, 5, 6], 0, 4, [])
    assert (prefilling.prefix, prefilling.draft) == ([1, 2, 3, 4], [])


def test_every_job_is_read_at_its_own_last_tokens() -> None:
    tier = local_tiers({Tier.SMALL: ScriptedModel(8, LOGITS)})[Tier.SMALL]
    jobs = [
        job([1, 2, 3, 4], 0, 4, [ask(0, 3), ask(1, 4), ask(2)], block=0),
        job([5, 6], 0, 2, [], block=1),
        job([6, 5], 0, 2, [ask(0)], block=2),
    ]
    readings, ms = tier.score(jobs)
    assert [len(said) for said in readings] == [3, 0, 1]
    for reading, context, draft in (
        (readings[0][0], (1, 2), 3),
        (readings[0][1], (1, 2, 3), 4),
        (readings[0][2], (1, 2, 3, 4), None),
        (readings[2][0], (6, 5), None),
    ):
        said = LOGITS(context)
        assert said.index(max(said)) == reading.token
        if draft is not None:
            share = math.exp(said[draft]) / sum(map(math.exp, said))
            assert math.isclose(share, reading.p_draft, rel_tol=1e-5)
    assert ms > 0


def test_models_with_heads_of_different_width_say_only_tokens_that_both_know() -> None:
    wide = ScriptedModel(10, lambda context: [0.0] * 8 + [5.0, 9.0])
    tiers = local_tiers({Tier.SMALL: wide, Tier.LARGE: ScriptedModel(8, LOGITS)})
    assert [tier.vocab_size for tier in tiers.values()] == [8, 8]
    [[reading]], _ = tiers[Tier.SMALL].score([job([1], 0, 1, [ask(0)])])
    assert reading.token == 0
    assert math.isclose(1 / 8, reading.p_token, rel_tol=1e-6)

"""Three tiers and more over scripted models: tokens, views and decisions against the scripts themselves."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, replace
from itertools import groupby

import pyarrow as pa
import pytest
from fakes import Answer, Logits, ask_for, decode, decode_one, fake_engine, near, noise_logits, with_policy
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import MIXED, SAMPLINGS, assert_a_grammar_binds, best, greedy, mixed_requests, softmax

from gateway.core import MIDDLES, Accept, Action, Mode, Outcome, Reason, Step, Tier, Verdict
from gateway.engine import Engine
from gateway.load import CostTable, Load
from gateway.lookup import AnswerStore
from gateway.policy import Level, Policy
from gateway.prefix import PrefixCache
from gateway.recorded import COLUMNS
from gateway.replay import replay
from logs.rows import Capture, step_table

VOCAB = 8
LARGE = noise_logits(1, VOCAB)
MIDDLE = near(LARGE, 5, 0.6)
SMALL = near(LARGE, 2, 1.2)


def engine(small: Logits = SMALL, middles: tuple[Logits, ...] = (MIDDLE,), **options: object) -> Engine:
    return fake_engine(small, LARGE, middles=middles, vocab_size=VOCAB, **options)


levels = st.none() | st.builds(
    Level, st.none() | st.sampled_from([0.0, 0.3, 0.8]), st.none() | st.integers(1, 9)
)
cases = st.fixed_dictionaries(
    {
        "noises": st.lists(st.floats(0.1, 2.5), min_size=1, max_size=3),
        "small_noise": st.floats(0.1, 4),
        "draft_length": st.integers(1, 8),
        "threshold": st.sampled_from([0.0, 0.2, 0.6]),
        "levels": st.tuples(levels, levels, levels),
        "protect_first": st.integers(0, 4),
        "max_small_run": st.integers(1, 9),
        "probe_rate": st.sampled_from([0.0, 0.3]),
        "fact_guard": st.booleans(),
        "lookup": st.booleans(),
        "block_size": st.sampled_from([1, 3, 64]),
        "prefill_chunk": st.integers(1, 200),
        "large_wait_s": st.sampled_from([0.0, 0.004]),
        "sampling": st.sampled_from(SAMPLINGS),
        "seed": st.integers(0, 2**40),
        "prompt": st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=90),
        "num_neighbours": st.integers(0, 6),
        "small_cost": st.sampled_from([None, 0.1, 5.0]),
        "reuse": st.booleans(),
        "accept": st.sampled_from(Accept),
    }
)


def policy_of(case: dict) -> Policy:
    return Policy(
        draft_length=case["draft_length"],
        threshold=case["threshold"],
        protect_first=case["protect_first"],
        max_small_run=case["max_small_run"],
        probe_rate=case["probe_rate"],
        fact_guard=case["fact_guard"],
        lookup=case["lookup"],
        loop_ngram=2,
        **dict(zip(MIDDLES, case["levels"], strict=True)),
    )


def cascade(case: dict) -> Engine:
    tiers = 2 + len(case["noises"])
    costs = {t: CostTable((1,), (case["small_cost"] or 1.0,)) for t in (Tier.SMALL, *MIDDLES[: tiers - 2])}
    return engine(
        near(LARGE, 3, case["small_noise"]),
        tuple(near(LARGE, 10 + i, noise) for i, noise in enumerate(case["noises"])),
        block_size=case["block_size"],
        num_blocks=2000,
        prefill_chunk=case["prefill_chunk"],
        large_wait_s=case["large_wait_s"],
        max_model_len=128,
        load=case["small_cost"] and Load({**costs, Tier.LARGE: CostTable((1, 8, 64), (1.0, 1.2, 4.0))}),
        answers=AnswerStore(1000) if case["reuse"] else None,
        prefixes=PrefixCache(3) if case["reuse"] else None,
    )


@given(cases)
@settings(max_examples=8, deadline=None)
def test_exact_is_large_only_whatever_stands_below(case: dict) -> None:
    request = ask_for("x", case["prompt"], policy=policy_of(case), seed=case["seed"], max_tokens=12)
    request = replace(request, sampling=replace(request.sampling, **case["sampling"]))
    expected = decode_one(
        engine(max_model_len=128, block_size=128), with_policy(request, mode=Mode.LARGE_ONLY)
    )
    busy = cascade(case)
    if case["reuse"]:  # a first run leaves keys, values and answers to copy from
        decode(busy, [replace(request, id="earlier")])
    got = decode(busy, [*mixed_requests(case["num_neighbours"]), request])["x", 0]
    assert expected.tokens == got.tokens
    assert expected.text == got.text


@given(cases)
@settings(max_examples=8, deadline=None)
def test_every_rule_leaves_a_tape_that_spells_the_output_and_replays(case: dict) -> None:
    """`decode` checks counts, protected prefix, run limit, signals, and replay of every tier's decisions."""
    policy = replace(policy_of(case), accept=case["accept"])
    request = ask_for("x", case["prompt"], policy=policy, seed=case["seed"], max_tokens=14)
    request = replace(request, sampling=replace(request.sampling, **case["sampling"]), audited=True)
    got = decode(cascade(case), [*mixed_requests(case["num_neighbours"]), request])["x", 0]
    for step in got.tape:
        assert [view.tier for view in step.middle] == sorted(
            (view.tier for view in step.middle), key=MIDDLES.index
        )
        for view in step.middle:
            assert view.draft_limit <= policy.at(view.tier).draft_length
            if view.verdict in (Verdict.RECOVERED, Verdict.OWN, Verdict.BONUS) and view is step.middle[-1]:
                written_by_it = step.tier is view.tier and step.token_id == view.choice
                assert written_by_it or step.tier is Tier.LARGE
            if policy.accept is Accept.EXACT and view.verdict is Verdict.REJECTED:
                assert step.token_id != view.choice
    runs = [len(list(g)) for large, g in groupby(s.tier is Tier.LARGE for s in got.output) if not large]
    assert max(runs, default=0) <= policy.max_small_run


def gap(logits: Logits, context: tuple[int, ...]) -> float:
    first, second = sorted(softmax(logits, context), reverse=True)[:2]
    return first - second


def cascaded(
    prompt: tuple[int, ...], num: int, policy: Policy, tiers: tuple[Logits, ...]
) -> list[tuple[int, int]]:
    """(token, number of the tier that wrote it) as the cascade is defined, one position at a time, greedy:
    each tier replaces a token it does not accept and passes it on, or leaves the word to the next."""

    def stands(token: int, said: Logits, context: tuple[int, ...]) -> bool:
        own = best(said, context)
        p = softmax(said, context)
        if policy.accept is Accept.EXACT:
            return token == own
        if policy.accept is Accept.THRESHOLD:
            return token == own or p[token] >= policy.accept_threshold
        return token == own or p[token] >= (1 - policy.alpha) * p[own]

    out: list[tuple[int, int]] = []
    thresholds = [policy.threshold, *(policy.at(tier).threshold for tier in MIDDLES)]
    for _ in range(num):
        context = (*prompt, *(token for token, _ in out))
        token, writer = None, 0
        for i, said in enumerate(tiers):
            if token is None or not stands(token, said, context):
                token, writer = best(said, context), i
            if i < len(tiers) - 1 and gap(said, context) < thresholds[i]:
                token = None
        out.append((token, writer))
    return out


@given(
    st.sampled_from([Accept.EXACT, Accept.THRESHOLD, Accept.TOKEN_V3]),
    st.lists(st.sampled_from([0.1, 0.3, 0.5]), min_size=3, max_size=3),
    st.lists(st.floats(0.2, 1.5), min_size=1, max_size=3),
    st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=6),
)
@settings(max_examples=10, deadline=None)
def test_tokens_and_their_writers_are_those_of_the_cascade_as_defined(
    accept: Accept, thresholds: list[float], noises: list[float], prompt: list[int]
) -> None:
    middles = tuple(near(LARGE, 20 + i, noise) for i, noise in enumerate(noises))
    policy = Policy(
        accept=accept,
        threshold=thresholds[0],
        draft_length=8,
        protect_first=0,
        lookup=False,
        loop_limit=0,
        **{tier: Level(t, 8) for tier, t in zip(MIDDLES, thresholds, strict=True)},
    )
    got = decode_one(engine(middles=middles), ask_for(prompt=prompt, policy=policy, max_tokens=24))
    full = [s.idx for s in got.tape if s.reason is Reason.DRAFT_FULL]
    full += [s.idx for s in got.tape for v in s.middle if v.reason is Reason.DRAFT_FULL]
    # From the first full draft on, a stronger tier writes where it would not have been asked.
    num = min(full, default=len(got.tokens))
    order = [Tier.SMALL, *MIDDLES[: len(middles)], Tier.LARGE]
    written = [(s.token_id, order.index(s.tier)) for s in got.output[:num]]
    assert written == cascaded(tuple(prompt), num, policy, (SMALL, *middles, LARGE))


def test_every_tier_writes_some_tokens_and_the_tape_says_who_overruled_whom() -> None:
    policy = Policy(
        accept=Accept.TOKEN_V3, alpha=0.5, threshold=0.1, protect_first=0, middle=Level(threshold=0.3)
    )
    requests = [ask_for(f"r{i}", (i % 7, i % 5, i % 3), policy=policy, max_tokens=40) for i in range(12)]
    middle = near(SMALL, 6, 0.5)
    got = decode(engine(middles=(middle,)), requests)
    rows = [step for answer in got.values() for step in answer.tape]
    writers = Counter(step.tier for step in rows if step.written)
    assert all(writers[tier] > 10 for tier in (Tier.SMALL, Tier.MIDDLE, Tier.LARGE))
    overruled = Counter((s.tier, s.overruled_by) for s in rows if s.outcome is Outcome.REJECTED)
    assert overruled[Tier.SMALL, Tier.MIDDLE] > 0
    assert overruled[Tier.SMALL, Tier.LARGE] > 0
    assert overruled[Tier.MIDDLE, Tier.LARGE] > 0
    assert set(overruled) == {(Tier.SMALL, Tier.MIDDLE), (Tier.SMALL, Tier.LARGE), (Tier.MIDDLE, Tier.LARGE)}
    for answer in got.values():
        for step in answer.tape:
            check_views(step, answer, middle)


def check_views(step: Step, answer: Answer, middle: Logits) -> None:
    """A view's numbers are those of the middle model's script at that position.

    Its prefix is the output's while the row was not thrown away after another.
    """
    if step.outcome is Outcome.DISCARDED:
        return
    context = (*answer_prompt(answer), *answer.tokens[: step.idx])
    for view in step.middle:
        if view.verdict is Verdict.PASSED or view.verdict is Verdict.REJECTED:
            continue
        assert view.choice == best(middle, context)
        p = softmax(middle, context)
        assert view.signals.top1_p == pytest.approx(max(p), abs=1e-6)
        assert view.signals.gap == pytest.approx(gap(middle, context), abs=1e-6)
        judged = step.token_id if step.tier is Tier.SMALL else step.small_choice
        about = judged if view.verdict is Verdict.ACCEPTED else view.choice
        assert view.p == pytest.approx(p[about], abs=1e-6)


def answer_prompt(answer: Answer) -> tuple[int, ...]:
    i = int(answer.tape[0].request_id.removeprefix("r"))
    return (i % 7, i % 5, i % 3)


@pytest.mark.parametrize("policy", MIXED)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_binds_every_tier_and_rolls_back_with_the_drafts(
    policy: Policy, temperature: float
) -> None:
    assert_a_grammar_binds(engine, policy, temperature)


@pytest.mark.parametrize("mode", [Mode.LARGE_ONLY, Mode.SHADOW])
def test_where_the_large_model_writes_alone_no_middle_tier_runs(mode: Mode) -> None:
    got = decode_one(engine(), ask_for(prompt=(3, 1), policy=Policy(mode=mode), max_tokens=20))
    assert got.tokens == greedy((3, 1), 20)
    assert got.finished.counts.middle_passes == 0
    assert not any(step.middle for step in got.tape)


def test_under_trust_a_middle_tiers_kept_token_stands_at_once() -> None:
    policy = Policy(accept=Accept.TRUST, threshold=0.5, protect_first=0, lookup=False, middle=Level(0.3))
    request = replace(ask_for(prompt=(2, 3), policy=policy, max_tokens=40), audited=True)
    got = decode_one(engine(), request)
    kept = [step for step in got.output if step.tier is Tier.MIDDLE]
    assert kept
    assert {Outcome.KEPT} == {step.outcome for step in kept}
    assert {Action.DEFER} == {step.action for step in kept}
    for step in kept:
        context = (2, 3, *got.tokens[: step.idx])
        assert step.token_id == best(MIDDLE, context)
        assert step.large_choice == best(LARGE, context)
        assert step.audit_agrees == (step.token_id == step.large_choice)
    assert all(gap(MIDDLE, (2, 3, *got.tokens[: s.idx])) < 0.3 for s in got.output if s.tier is Tier.LARGE)


def test_raising_a_middle_threshold_sends_more_to_the_large_model() -> None:
    shares = []
    for threshold in (0.0, 0.4, 0.8, 1.0):
        policy = Policy(accept=Accept.TRUST, threshold=0.5, protect_first=0, lookup=False)
        policy = replace(policy, max_small_run=1000, loop_limit=0, middle=Level(threshold))
        requests = [ask_for(f"r{i}", (i,), policy=policy, max_tokens=40) for i in range(7)]
        got = decode(engine(), requests)
        shares.append(sum(a.finished.counts.large_tokens for a in got.values()))
    assert shares[0] == 0
    assert shares == sorted(shares)
    assert shares[1] < shares[3]


def recorded(answer: Answer) -> list[dict]:
    return step_table(answer.tape, [1] * len(answer.rows), Capture.FULL).select(COLUMNS).to_pylist()


def mismatches(policy: Policy, rows: list[dict], schema: object) -> list[str]:
    table = pa.Table.from_pylist(rows, schema=schema)
    about = {"request_id": "r", "choice": 0, "policy": asdict(policy)}
    return [mismatch.column for mismatch in replay(about, table).mismatches]


def test_replay_catches_what_a_middle_tier_did_not_say() -> None:
    policy = Policy(accept=Accept.TOKEN_V3, threshold=0.2, protect_first=2, middle=Level(threshold=0.3))
    answer = decode_one(engine(), ask_for(prompt=(1, 2, 3), policy=policy, max_tokens=40))
    table = step_table(answer.tape, [1] * len(answer.rows), Capture.FULL).select(COLUMNS)
    schema, rows = table.schema, table.to_pylist()
    assert mismatches(policy, rows, schema) == []
    decided = [
        (i, j)
        for i, row in enumerate(rows)
        for j, view in enumerate(row["middle"] or ())
        if view["reason"] in ("confident", "low_confidence")
    ]
    assert len(decided) > 20
    for i, j in decided[::6]:
        for name, value in (
            ("gap", 0.123), ("action", "keep" if rows[i]["middle"][j]["action"] == "defer" else "defer"),
            ("reason", "run_limit"), ("score", 0.456), ("draft_pos", 17), ("run_length", 33),
            ("ema_acceptance", 0.25), ("guard_value", 5.0), ("threshold", 0.9), ("verdict", "rejected"),
        ):  # fmt: skip
            tampered = table.to_pylist()
            tampered[i]["middle"][j][name] = value
            assert mismatches(policy, tampered, schema), (i, j, name)
    for i, row in enumerate(rows):
        if row["overruled_by"] == "middle":
            tampered = table.to_pylist()
            tampered[i]["overruled_by"] = "large"
            assert "overruled_by" in mismatches(policy, tampered, schema)


@pytest.mark.parametrize("column", COLUMNS)
def test_a_missing_column_is_no_reason_to_crash(column: str) -> None:
    policy = Policy(accept=Accept.TOKEN_V3, threshold=0.2, protect_first=2, middle=Level(threshold=0.3))
    answer = decode_one(engine(), ask_for(prompt=(1, 2, 3), policy=policy, max_tokens=20))
    table = step_table(answer.tape, [1] * len(answer.rows), Capture.FULL).select(COLUMNS)
    field = table.schema.field(column)
    table = table.set_column(
        table.schema.get_field_index(column), field, pa.nulls(table.num_rows, field.type)
    )
    found = replay({"request_id": "r", "choice": 0, "policy": asdict(policy)}, table).mismatches
    optional = {"large_choice", "attn_entropy", "hidden", "probe_u", "fact_value", "audit_agrees"}
    optional |= {"action", "token_id"}
    assert bool(found) is (column not in optional)


def test_without_token_ids_every_tiers_decisions_still_replay() -> None:
    policy = Policy(accept=Accept.TOKEN_V3, threshold=0.2, protect_first=2, loop_ngram=2, loop_limit=1)
    answer = decode_one(engine(), ask_for(prompt=(1, 2, 3), policy=policy, max_tokens=40))
    table = step_table(answer.tape, [1] * len(answer.rows), Capture.SIGNALS)
    assert table["middle"].to_pylist()[-1][0]["choice"] is None
    found = replay({"request_id": "r", "choice": 0, "policy": asdict(policy)}, table.select(COLUMNS))
    assert found.mismatches == []
    assert found.decisions > 40


def test_a_middle_level_is_part_of_the_policys_hash_and_absent_ones_are_not() -> None:
    assert Policy().hash == "e73fee7c9004"
    assert Policy(middle=Level(0.4)).hash != Policy(middle=Level(0.5)).hash != Policy().hash
    assert math.isclose(Policy(threshold=0.7).at(Tier.MIDDLE).threshold, 0.7)
    assert Policy(middle=Level(draft_length=9)).at(Tier.MIDDLE).draft_length == 9

"""Decision replay of what the real engine writes, over scripted models."""

from dataclasses import asdict, replace

import pyarrow as pa
import pytest
from fakes import ask_for, decode, fake_engine, near, noise_logits
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.core import Accept, Mode, Reason, Tier
from gateway.policy import Policy
from gateway.recorded import COLUMNS
from gateway.replay import replay
from gateway.router import Router
from gateway.whatif import what_if
from logs.rows import Capture, step_table

VOCABULARY = 8
LARGE = noise_logits(1, VOCABULARY, memory=2)
SMALL = near(LARGE, 2, 1.0)

ROUTER = Router((0.5,) * 8, (2.0,) * 8, ((0.5,) * 8, (-0.25,) * 8), (0.125, 1.0), (1.5, -0.5), 0.25)
PROBING = replace(
    ROUTER, mean=(0.5,) * 9, scale=(2.0,) * 9, hidden=((0.5,) * 9, (-0.25,) * 9), probe=(0.75, -0.3125)
)

policies = st.builds(
    Policy,
    mode=st.sampled_from([*[Mode.ROUTED] * 5, *Mode]),
    accept=st.sampled_from([a for a in Accept if a is not Accept.EXACT] + [Accept.EXACT] * 3),
    threshold=st.floats(0, 0.7),
    draft_length=st.integers(1, 6),
    protect_first=st.integers(0, 4),
    max_small_run=st.integers(1, 12),
    lookup=st.booleans(),
    run_weight=st.sampled_from([0.0, -0.3]),
    acceptance_weight=st.sampled_from([0.0, 0.25]),
    loop_ngram=st.integers(1, 5),
    loop_limit=st.integers(0, 3),
    probe_rate=st.sampled_from([0.0, 0.3]),
    attn_entropy_weight=st.sampled_from([0.0, -0.1]),
    position_weight=st.sampled_from([0.0, 0.4]),
    fact_guard=st.booleans(),
    router=st.sampled_from([None, ROUTER, PROBING]),
)


def replayed(policy, answer, capture=Capture.FULL):
    row = {"request_id": "r", "choice": 0, "policy": asdict(policy)}
    return replay(row, step_table(answer.tape, [1] * len(answer.tape), capture).select(COLUMNS))


def run(policy, *, forced=(), budget=None, **sampling):
    policy = policy if budget is None or policy.accept is Accept.EXACT else _with_budget(policy, budget)
    request = ask_for(policy=policy, max_tokens=24, **sampling)
    if forced:
        request = _with_forced(request, forced)
    engine = fake_engine(SMALL, LARGE, vocab_size=VOCABULARY, ride_along=True)
    return policy, decode(engine, [request])["r", 0]


def _with_budget(policy, budget):
    return replace(policy, large_token_budget=max(budget, policy.protect_first))


def _with_forced(request, forced):
    return type(request)(**{name: getattr(request, name) for name in request.__slots__} | {"forced": forced})


@settings(max_examples=30, deadline=None)
@given(policies, st.none() | st.integers(2, 8), st.sampled_from([0.0, 1.0]), st.integers(0, 99))
def test_every_decision_of_the_engine_replays(policy, budget, temperature, seed):
    policy, answer = run(policy, budget=budget, temperature=temperature, seed=seed)

    result = replayed(policy, answer)

    assert result.mismatches == []
    assert result.decisions > 0 or not answer.output


LOOKED_UP = Policy(
    accept=Accept.TRUST, threshold=0.0, draft_length=1, protect_first=0, max_small_run=1, loop_limit=0
)
"""Under it the large model turns looked-up tokens down."""


@settings(max_examples=50, deadline=None)
@example(LOOKED_UP, None, 1.0, 0)
@given(policies, st.none() | st.integers(2, 8), st.sampled_from([0.0, 1.0]), st.integers(0, 99))
def test_what_if_nothing_changed_then_nothing_flips(policy, budget, temperature, seed):
    policy, answer = run(policy, budget=budget, temperature=temperature, seed=seed)
    row = {"request_id": "r", "choice": 0, "policy": asdict(policy)}
    steps = step_table(answer.tape, [1] * len(answer.tape), Capture.FULL)

    found = what_if(row, steps, policy)

    assert (found.flips, found.unknown) == ([], [])
    assert found.exact_until is None


@settings(max_examples=10, deadline=None)
@given(policies, st.integers(0, 99))
def test_and_so_it_does_without_token_ids(policy, seed):
    policy, answer = run(policy, temperature=1.0, seed=seed)

    assert replayed(policy, answer, Capture.SIGNALS).mismatches == []


@pytest.mark.parametrize("accept", list(Accept))
def test_what_if_decides_alike_without_token_ids(accept):
    """Looked-up and leniently accepted tokens stood although the small, or the large model, said others."""
    differed = 0
    for seed in range(8):
        policy = Policy(
            accept=accept,
            protect_first=0,
            threshold=0.2,
            draft_length=3,
            small_repetition_penalty=1.5,
            loop_limit=0,
        )
        policy, answer = run(policy, seed=seed, temperature=0.7)
        row = {"request_id": "r", "choice": 0, "policy": asdict(policy)}
        tables = [step_table(answer.tape, [1] * len(answer.tape), c) for c in (Capture.FULL, Capture.SIGNALS)]
        full, blind = (what_if(row, table, policy).decisions for table in tables)
        assert blind == full
        differed += sum(s.audit_agrees is False and s.tier is not Tier.LARGE for s in answer.output)

    assert differed


@pytest.mark.parametrize("accept", [Accept.EXACT, Accept.TRUST])
def test_and_so_it_does_from_a_forks_given_tokens_on(accept):
    given_tokens = tuple((i % 3, tier) for i, tier in enumerate([Tier.LARGE, Tier.SMALL, Tier.SMALL] * 2))
    policy, answer = run(Policy(accept=accept, protect_first=0, threshold=0.2), forced=given_tokens)

    assert replayed(policy, answer).mismatches == []


def test_the_engine_looked_something_up():
    """The properties above would prove little about lookup if it never fired."""
    seen = set()
    for seed in range(6):
        policy = Policy(protect_first=0, threshold=0.9, loop_limit=0)
        _, answer = run(policy, seed=seed, temperature=0.7)
        seen |= {(row.tier, row.reason, row.outcome.value) for row in answer.tape}

    assert {(Tier.LOOKUP, Reason.LOOKUP_HIT, o) for o in ("accepted", "rejected")} <= seen


def test_a_hidden_state_is_recorded_where_the_router_reads_it():
    """And without it a decision cannot be recomputed, which is said."""
    policy, answer = run(Policy(router=PROBING, threshold=0.3))
    table = step_table(answer.tape, [1] * len(answer.tape), Capture.FULL)
    row = {"request_id": "r", "choice": 0, "policy": asdict(policy)}
    scored = [s for s in answer.tape if s.score is not None]
    _, plain = run(Policy(router=ROUTER))

    assert scored
    assert all(len(s.signals.hidden) == 4 for s in scored)
    assert len({s.signals.hidden for s in scored}) > 1
    assert all(s.signals is None or s.signals.hidden is None for s in plain.tape)
    assert replay(row, table).mismatches == []

    blank = pa.nulls(table.num_rows, pa.binary())
    lost = table.set_column(table.schema.get_field_index("hidden"), "hidden", blank)
    assert {m.column for m in replay(row, lost).mismatches} == {"hidden"}
    assert len(what_if(row, lost, policy).unknown) >= len(scored) // 2

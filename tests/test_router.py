"""Learned routers and facts: against numpy, through their file, in the policy, and replayed."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from gateway.config import ConfigError, load_config
from gateway.core import Action, Reason, Signals
from gateway.facts import looks_like_fact
from gateway.loading import check_probes
from gateway.policy import Policy, State, decide, f32, score
from gateway.replay import UnknownPolicy, recorded_policy
from gateway.router import FEATURES, Router, features
from gateway.router_file import load_router, save_router

N = len(FEATURES)
unit = st.floats(0, 1, width=32)


WIDTH = 6
"""Of the hidden state in these tests."""


def router(seed: int, units: int, width: int = 0) -> Router:
    rng = np.random.default_rng(seed)

    def draw(n: int) -> tuple[float, ...]:
        return tuple(rng.normal(size=n).astype(np.float32).tolist())

    n = N + bool(width)
    hidden = tuple(draw(n) for _ in range(units))
    scale = tuple(abs(v) + 0.5 for v in draw(n))
    numbers = draw(n), tuple(map(f32, scale)), hidden, draw(units), draw(units or n), draw(1)[0]
    return Router(*numbers, draw(width))


@given(
    st.integers(0, 99),
    st.sampled_from([0, 1, 7]),
    unit,
    unit,
    st.floats(0, 8),
    st.none() | unit,
    st.integers(0, 500),
    st.sampled_from([0, WIDTH]),
)
def test_agrees_with_numpy(seed, units, top1, gap, entropy, attention, idx, width):
    r = router(seed, units, width)
    state = np.random.default_rng(seed).normal(size=width).astype("<f2")
    signals = Signals(top1, gap, entropy, attention, state.tobytes() if width else None)
    x = np.array(
        [top1, gap, -np.log(max(1 - gap, 1e-4)), entropy, attention or 0.0, np.log1p(idx), 0.25, 0.5]
    )
    assert features(signals, idx, 0.25, 0.5) == pytest.approx(x)
    if width:
        x = np.append(x, np.dot(state.astype(float), r.probe))
    h = (x - r.mean) / r.scale
    if units:
        h = np.maximum(np.array(r.hidden) @ h + r.hidden_bias, 0)
    expected = 1 / (1 + np.exp(-(np.dot(r.output, h) + r.bias)))
    assert r.agreement(signals, idx, 0.25, 0.5) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("units", "width"), [(0, 0), (5, 0), (0, WIDTH), (5, WIDTH)])
def test_a_router_survives_its_file_and_the_tape(tmp_path: Path, units: int, width: int):
    save_router(tmp_path / "r.safetensors", router(1, units, width))
    read = load_router(tmp_path / "r.safetensors")
    policy = Policy(router=read)
    assert read == router(1, units, width)
    assert policy.reads_hidden is bool(width)
    assert recorded_policy(asdict(policy)) == policy
    assert recorded_policy(asdict(policy)).hash == policy.hash != Policy().hash
    assert Policy(router=replace(read, bias=read.bias + 1)).hash != policy.hash


def test_the_score_is_the_routers():
    policy = Policy(router=router(3, 4), threshold=0.0)
    at = State(20, 0, 5, 16, 0.0, 0.5, 0)
    said = Signals(0.8, 0.7, 0.5, 1.5)
    assert score(policy, at, said) == f32(policy.router.agreement(said, 20, 0.25, 0.5))
    assert decide(policy, at, said).reason is Reason.CONFIDENT


def test_attention_and_position_terms():
    at = State(64, 0, 5, 0, 0.0, 1.0, 0)
    policy = Policy(gap_weight=0.5, attn_entropy_weight=-0.125, position_weight=0.5)
    assert score(policy, at, Signals(0.9, 0.5, 1.0, 1.0)) == 0.25 - 0.125 + 0.125
    assert score(policy, at, Signals(0.9, 0.5, 1.0)) == 0.375
    assert score(policy, structs.replace(at, idx=9999), Signals(0.9, 0.5, 1.0)) == 0.75


def test_config_names_a_router_by_file(tmp_path: Path):
    save_router(tmp_path / "r.safetensors", router(2, 3))
    file = tmp_path / "policy.toml"
    file.write_text('[policy.stable]\nrouter = "r.safetensors"\n')
    assert load_config(file, {}).policies["stable"].router == router(2, 3)
    file.write_text('[policy.stable]\nrouter = "missing.safetensors"\n')
    with pytest.raises(ConfigError, match=r"policy\.stable\.router: .*missing"):
        load_config(file, {})


def test_a_hidden_state_that_is_not_there_or_of_another_width_cannot_be_read():
    policy = Policy(router=router(0, 0, WIDTH))
    at = State(20, 0, 5, 0, 0.0, 1.0, 0)
    for signals in (Signals(0.9, 0.5, 1.0), Signals(0.9, 0.5, 1.0, None, bytes(2))):
        assert not policy.can_score(signals)
        assert Policy(router=router(0, 0)).can_score(signals)
        with pytest.raises(ValueError, match="hidden state of 6 values"):
            score(policy, at, signals)
    assert policy.can_score(Signals(0.9, 0.5, 1.0, None, bytes(2 * WIDTH)))


def test_hidden_states_need_the_full_tape_and_the_model_they_are_of(tmp_path: Path):
    save_router(tmp_path / "r.safetensors", router(2, 3, WIDTH))
    file = tmp_path / "policy.toml"
    file.write_text('[policy.loose]\nrouter = "r.safetensors"\n[logs]\ncapture = "signals"\n')
    with pytest.raises(ConfigError, match=r"policy\.loose\.router: .*logs\.capture"):
        load_config(file, {})
    file.write_text('[policy.loose]\nrouter = "r.safetensors"\n')
    config = load_config(file, {})
    check_probes(config, WIDTH)
    with pytest.raises(ConfigError, match=r"policy\.loose\.router: it reads 6 .* has 8"):
        check_probes(config, 8)


def test_broken_routers_are_refused(tmp_path: Path):
    (tmp_path / "r.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match="safetensors"):
        load_router(tmp_path / "r.safetensors")
    with pytest.raises(ValueError, match="features"):
        Router((0.0,), (1.0,), (), (), (1.0,), 0.0)
    with pytest.raises(ValueError, match="finite"):
        replace(router(0, 0), bias=float("nan"))
    with pytest.raises(UnknownPolicy, match="router"):
        recorded_policy(asdict(Policy()) | {"router": {"bias": 1}})


@pytest.mark.parametrize(
    ("before", "token", "fact"),
    [
        ("It was built in ", "18", True),
        ("It was built in", " iron", False),
        ("The tower, said ", "Gust", True),
        ("The tower, said Gust", "ave", True),
        ("", "The", False),
        ("It is tall. ", "The", False),
        ("It is tall. The", " tower", False),
        ('She said "never', " again", True),
        ('She said "never".', " then", False),
        ("don't", " do", False),
        ("x = 1\n", "\n", False),
    ],
)
def test_facts(before: str, token: str, fact: bool):
    assert looks_like_fact(before, token) is fact


def test_the_fact_guard_defers_whatever_the_score():
    at = State(20, 0, 5, 0, 0.0, 1.0, 0, fact_value=1.0)
    sure = Signals(1.0, 1.0, 0.0)
    decision = decide(Policy(fact_guard=True), at, sure)
    assert (decision.action, decision.reason, decision.score) == (Action.DEFER, Reason.FACT_GUARD, 1.0)
    assert decide(Policy(), at, sure).action is Action.KEEP
    assert decide(Policy(fact_guard=True), structs.replace(at, fact_value=0.0), sure).action is Action.KEEP

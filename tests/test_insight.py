"""GET /v1/advisor: which threshold is in force, and which one a calibration has shown."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from serving import TINY, fake_gateway

from gateway.config import Calibration
from gateway.routing import PolicyTable

CALIBRATED = PolicyTable(threshold=0.7)


def calibration(policy_hash: str) -> Calibration:
    return Calibration(
        small_hash="1" * 64, large_hash="2" * 64, policy_hash=policy_hash, numerics="cpu/float32/none",
        max_disagreement=0.02, confidence=0.95, observed=0.01, prompts=300, prompts_sha256="0" * 64,
        date="2026-11-30",
    )  # fmt: skip


@pytest.mark.parametrize("held", [True, False])
def test_the_calibrated_threshold_is_told_while_it_holds(tmp_path: Path, held: bool) -> None:
    config = msgspec.structs.replace(TINY, policy={"stable": CALIBRATED, "other": PolicyTable(threshold=0.2)})
    shown = config.policies["stable" if held else "other"].hash
    config = msgspec.structs.replace(config, calibration={"stable": calibration(shown)})
    with fake_gateway(config, data_dir=tmp_path) as gateway:
        advice = gateway.http.get("/v1/advisor").json()
        other = gateway.http.get("/v1/advisor", params={"policy": "other"}).json()
    assert (advice["current"], advice["calibrated"]) == (0.7, 0.7 if held else None)
    assert (other["current"], other["calibrated"]) == (0.2, None)


def test_without_calibration_it_is_null(tmp_path: Path) -> None:
    with fake_gateway(data_dir=tmp_path) as gateway:
        assert gateway.http.get("/v1/advisor").json()["calibrated"] is None

"""`tokentape diagnose` and `tokentape rollout`, through a gateway that runs in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog.testing
from serving import FakeGateway, fake_gateway

from alerts.config import AlertsConfig
from alerts.service import AlertsService
from gateway.cli import main


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The gateway's log lines, in this process, would be on the command's standard output."""
    with structlog.testing.capture_logs():
        yield


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[FakeGateway]:
    """A gateway on the tape in tmp_path, with rollouts and a few answers on it."""
    with fake_gateway(data_dir=tmp_path) as gateway:
        assert gateway.service.recorder is not None
        gateway.service.alerts = AlertsService(
            config=AlertsConfig(),
            data_dir=tmp_path,
            cursor=gateway.service.recorder.cursor,
            policies=gateway.service.policies,
            environ={},
            base_url=gateway.url,
            samples=dict,
            queue_limit=64,
        )
        for i in range(3):
            body = {"model": "tiny", "prompt": f"{i}", "max_tokens": 30}
            assert gateway.post("/v1/completions", body).status_code == 200
        (tmp_path / "gateway.url").write_text(gateway.url)
        yield gateway


def rollout(tmp_path: Path, *arguments: str) -> int:
    return main(["rollout", *arguments, "--data-dir", str(tmp_path)])


def test_diagnose_prints_what_the_gateway_found(
    gateway: FakeGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", "--data-dir", str(tmp_path)]) == 0
    through = capsys.readouterr().out
    findings = gateway.http.get("/v1/diagnose").json()["data"]
    assert findings
    for finding in findings:
        assert f"{finding['cause']}: " in through
        assert finding["evidence"] in through
        assert (f"-> {finding['change']}" in through) == finding["noticed"]


def test_diagnose_reads_the_file_when_no_gateway_holds_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_gateway(data_dir=tmp_path) as gateway:
        gateway.post("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 30})
        assert main(["diagnose", "--url", gateway.url]) == 0
        through = capsys.readouterr().out
    assert main(["diagnose", "--data-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == through


def test_diagnose_of_nothing_is_1(
    gateway: FakeGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", "--data-dir", str(tmp_path), "--arm", "canary"]) == 1
    assert capsys.readouterr().out.startswith("no traces")


def test_a_rollout_from_the_shell(
    gateway: FakeGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rollout(tmp_path, "status") == 0
    assert capsys.readouterr().out == "no rollouts\n"

    settings = ["--set", "threshold=0.3", "--set", "accept=trust", "--min-units", "7"]
    assert rollout(tmp_path, "start", "looser", *settings, "--steps", "0.1,0.5") == 0
    started, *_, estimate = capsys.readouterr().out.splitlines()
    assert started == "looser: progressing, weight 0.1, step 0, units stable 0 canary 0"
    assert json.loads(estimate.removeprefix("until a verdict: "))["basis"]
    told = gateway.http.get("/v1/rollouts/looser").json()
    assert told["canary"] == {"threshold": 0.3, "accept": "trust"}
    assert (told["steps"], told["min_units"]) == ([0.1, 0.5], 7)

    assert rollout(tmp_path, "pause", "looser") == 0
    assert "progressing, paused, weight 0.1" in capsys.readouterr().out
    assert rollout(tmp_path, "resume", "looser") == 0
    assert rollout(tmp_path, "promote", "looser") == 0
    assert rollout(tmp_path, "status", "looser") == 0
    assert "looser: promoted, weight 1" in capsys.readouterr().out
    policy = gateway.service.stable
    assert (policy.threshold, policy.accept) == (0.3, "trust")


def test_what_cannot_be_is_2_and_one_line_that_names_it(
    gateway: FakeGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, named in (
        (["start", "x", "--set", "threshold"], "--set"),
        (["start", "x", "--set", "=1"], "--set"),
        (["start", "x", "--set", "treshold=0.1"], "canary.treshold"),
        (["start", "x", "--set", "threshold=0.1", "--steps", "a,b"], "--steps"),
        (["start", "x", "--set", "threshold=0.1", "--weight", "7"], "weight"),
        (["status", "nobody"], "nobody"),
        (["abort", "no/body"], "no/body"),
    ):
        assert rollout(tmp_path, *arguments) == 2
        told = capsys.readouterr().err
        assert named in told
        assert told.count("\n") == 1


def test_a_second_rollout_is_refused_in_the_gateways_words(
    gateway: FakeGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rollout(tmp_path, "start", "first", "--set", "threshold=0.3") == 0
    assert rollout(tmp_path, "start", "second", "--set", "threshold=0.4") == 2
    assert "'first' is active" in capsys.readouterr().err


def test_no_running_gateway_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # What a killed gateway leaves behind.
    (tmp_path / "gateway.url").write_text("http://127.0.0.1:9")
    assert rollout(tmp_path, "status") == 2
    assert "--url" in capsys.readouterr().err
    assert main(["diagnose", "--url", "http://127.0.0.1:9"]) == 2


def test_spot_checks_go_through_the_gateway_that_holds_the_tape(
    gateway: FakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["g reads well", "b", "q"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))

    assert main(["spotcheck", "--n", "3", "--reviewer", "ada", "--data-dir", str(tmp_path)]) == 0

    told = capsys.readouterr().out
    rated = [line.rpartition(": ")[2] for line in told.splitlines() if line.startswith("--- ")][:2]
    traces = [gateway.http.get(f"/v1/traces/{trace}").json() for trace in rated]
    said = [(r["verdict"], r["note"], r["reviewer"]) for trace in traces for r in trace["reviews"]]
    assert said == [("good", "reads well", "ada"), ("bad", None, "ada")]
    assert all(trace["choices"][0]["answer_text"] in told for trace in traces)
    assert told.splitlines()[-1].startswith("good 50.0% of 2 [")
    # What was rated is not drawn again; the third was skipped.
    left = gateway.http.get("/v1/reviews/sample?n=9").json()["data"]
    assert len(left) == 1
    assert left[0]["request_id"] not in rated


def test_a_spot_check_that_the_gateway_refuses(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("builtins.input", lambda _: "g " + "x" * 100_000)
    assert main(["spotcheck", "--n", "1", "--url", gateway.url]) == 2
    assert "refused: note" in capsys.readouterr().err
    assert main(["spotcheck", "--url", "http://127.0.0.1:1"]) == 2
    assert "no gateway answers" in capsys.readouterr().err

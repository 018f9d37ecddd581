from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from fake_worker import FakeWorker
from serving import fake_gateway

from gateway.cli import main
from gateway.core import Sampling
from gateway.policy import Policy
from gateway.request import Request
from logs.recorder import Recorder


@pytest.mark.parametrize("command", [[], ["serve"], ["models"], ["models", "pull"], ["replay"], ["config"]])
def test_help_explains_each_command(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    assert "usage: tokentape" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [[], ["dance"], ["serve", "--prot", "1"], ["serve", "--port", "x"], ["replay"]]
)
def test_wrong_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err


def test_a_bad_config_is_2_and_one_line_naming_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[server]\nprt = 1\n")
    assert main(["serve", "--config", str(file)]) == 2
    assert capsys.readouterr().err == "tokentape: server.prt: unknown key\n"


def test_config_prints_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    assert "| `max_rows` |" in capsys.readouterr().out


def test_the_command_line_does_not_load_torch() -> None:
    script = "import sys, gateway.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def no_decisions(data_dir: Path) -> str:
    """A tape with one trace that the large model wrote alone."""
    recorder = Recorder(data_dir)
    worker = FakeWorker([recorder])
    worker.submit(
        Request("quiet", 0, (1,), Sampling(max_tokens=2, seed=1), Policy(), "stable", 0.0), lambda d: None
    )
    recorder.close()
    return "quiet"


def test_replay_without_a_tape_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--all", "--data-dir", str(tmp_path / "none")]) == 2
    assert "--data-dir" in capsys.readouterr().err


def test_replay_of_an_unknown_trace_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    no_decisions(tmp_path)
    assert main(["replay", "absent", "--data-dir", str(tmp_path)]) == 2
    assert "absent" in capsys.readouterr().err


def test_replay_finds_what_does_not_follow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The fake worker's decisions ignore the protected prefix, so they cannot replay.
    trace_id = no_decisions(tmp_path)
    assert main(["replay", trace_id, "--data-dir", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("2 decisions, ")
    assert "2 decisions, 0 mismatches" not in out


def test_replay_of_nothing_is_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Recorder(tmp_path).close()
    assert main(["replay", "--all", "--data-dir", str(tmp_path)]) == 1
    assert capsys.readouterr().out == "0 decisions, 0 mismatches\n"


def test_replay_goes_through_the_gateway_that_holds_the_tape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_gateway(data_dir=tmp_path) as gateway:
        gateway.post("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 2})
        (tmp_path / "gateway.url").write_text(gateway.url)
        assert main(["replay", "--all", "--data-dir", str(tmp_path)]) == 1
        through = capsys.readouterr().out
        report = httpx.get(f"{gateway.url}/v1/replay", trust_env=False).json()
        assert (
            f"{report['decisions']} decisions, {report['mismatches']} mismatches" == through.splitlines()[-1]
        )
        assert main(["replay", "absent", "--url", gateway.url]) == 2


def test_replay_of_a_gateway_that_is_gone_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--all", "--url", "http://127.0.0.1:9"]) == 2
    assert "--url" in capsys.readouterr().err

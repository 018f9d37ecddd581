"""SIGKILL in the middle of a stream: the next start has all but the last second, and it replays."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import pytest
from process import Serving

from gateway import cli

pytestmark = pytest.mark.e2e


def test_a_killed_gateway_takes_its_ui_along(tmp_path: Path) -> None:
    with Serving(tmp_path / "data") as process:
        url = f"http://127.0.0.1:{process.ui_port}"
        deadline = time.monotonic() + 60
        while not _answers(url):
            assert time.monotonic() < deadline, "the UI never came up"
        process.kill()
        while _answers(url):
            assert time.monotonic() < deadline, "the UI outlived its gateway"


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def test_killed_in_mid_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = {
        "model": "tiny",
        "prompt": "once",
        "max_tokens": 3000,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    served: list[tuple[float, int]] = []
    with Serving(tmp_path / "data", "--no-ui") as process:
        try:
            with httpx.stream("POST", f"{process.url}/v1/completions", json=body, trust_env=False) as stream:
                trace_id = stream.headers["x-request-id"]
                for line in stream.iter_lines():
                    if line.startswith("data: {"):
                        ids = json.loads(line[6:])["choices"][0].get("token_ids") or []
                        served += [(time.monotonic(), token) for token in ids]
                    if served and served[-1][0] - served[0][0] > 2.0:
                        killed = time.monotonic()
                        process.kill()
                        break
        except httpx.HTTPError:
            pass
    due = [token for at, token in served if at < killed - 1.0]
    assert len(due) > 50
    with Serving(tmp_path / "data", "--no-ui") as again:
        url = f"{again.url}/v1/traces/{trace_id}"
        summary = httpx.get(url, trust_env=False).json()
        found = httpx.get(f"{url}/steps", trust_env=False).json()["columns"]
        kept = [
            token
            for token, outcome in zip(found["token_id"], found["outcome"], strict=True)
            if outcome not in ("rejected", "discarded")
        ]
        assert summary["finish_reason"] is None
        assert kept[: len(due)] == due
        assert cli.main(["replay", "--all", "--url", again.url]) == 0
        assert capsys.readouterr().out.endswith(", 0 mismatches\n")

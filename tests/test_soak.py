"""Long fault and load runs against `tokentape serve --preset tiny` in a process of its own (`make soak`)."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from logs.reader import Reader

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

NUM_REQUESTS = int(os.environ.get("SOAK_REQUESTS", "2000"))
QUARTERS = 4
AT_A_TIME = 64
LEAVES = 5
"""Every so manieth client leaves: 20 %."""
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@dataclass
class Served:
    """A gateway process."""

    url: str
    process: subprocess.Popen[str]
    data_dir: Path

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", trust_env=False, timeout=30).text
        found = re.search(rf"^tokentape:{name} (\S+)$", text, flags=re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    def rss_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    # Answers to generated chats that name no length would otherwise take minutes.
    environ = {**os.environ, "TOKENTAPE_ENGINE_MAX_MODEL_LEN": "512"}
    command = [sys.executable, "-m", "gateway.cli", "serve", "--preset", "tiny", "--no-ui", "--port", "0"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--data-dir", str(tmp_path / "tape")],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environ,
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready "), (tmp_path / "log").read_text()[-2000:]
        yield Served(line.split()[1], process, tmp_path / "tape")
        process.kill()
        process.wait()
        process.stdout.close()


@dataclass
class Seen:
    """What the clients saw: output tokens by trace id, and how each request went."""

    tokens: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    complete: set[str] = field(default_factory=set)


def random_body(rng: random.Random) -> dict[str, Any]:
    """A body with a few random fields."""
    optional = {
        "temperature": rng.choice([0, 0.5, 1.0]),
        "top_p": rng.uniform(0.1, 1),
        "top_k": rng.choice([-1, 1, 20]),
        "min_p": rng.uniform(0, 0.2),
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.uniform(0.8, 1.5),
        "logit_bias": {str(rng.randrange(256)): rng.uniform(-100, 100)},
        "stop": rng.sample(["e", "th", "\n", "zz"], 2),
        "n": rng.choice([1, 1, 2]),
        "min_tokens": 1,
        "ignore_eos": True,
        "logprobs": rng.randrange(4),
        "echo": True,
        "routing": rng.choice(
            [
                {"mode": "large_only"},
                {"mode": "small_only"},
                {"accept": "trust", "protect_first": 0},
                {"accept": "threshold", "draft_length": 8},
                {"threshold": rng.random(), "protect_first": rng.randrange(4)},
            ]
        ),
    }
    chosen = {name: value for name, value in optional.items() if rng.random() < 0.3}
    if chosen.get("routing", {}).get("mode") == "small_only" and "logprobs" in chosen:
        chosen.pop("echo", None)
    prompt = "".join(rng.choice("abc def ghi\n") for _ in range(rng.randint(1, 120)))
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": rng.randint(1, 24),
        "seed": rng.randrange(1000),
        "stream": True,
        "return_token_ids": True,
        **chosen,
    }


async def one(client: httpx.AsyncClient, rng: random.Random, seen: Seen, leaves: bool) -> None:
    """One streamed request; some clients leave after a random number of chunks."""
    body, leave_after = random_body(rng), None
    if leaves:
        # Long enough that the answer cannot end before its reader has left.
        body |= {"max_tokens": 160, "ignore_eos": True, "stop": None}
        leave_after = rng.randrange(12)
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            seen.ended[str(response.status_code)] += 1
            return
        trace_id = response.headers["x-request-id"]
        chunks = 0
        async for line in response.aiter_lines():
            if leave_after is not None and chunks >= leave_after:
                seen.ended["left"] += 1
                return
            if line == "data: [DONE]":
                seen.ended["complete"] += 1
                seen.complete.add(trace_id)
            elif line.startswith("data: "):
                chunks += 1
                data = json.loads(line.removeprefix("data: "))
                if "error" in data:
                    seen.ended[data["error"]["code"]] += 1
                    return
                seen.tokens[trace_id] += sum(len(c["token_ids"]) for c in data["choices"])


async def load(served: Served, num: int, rng: random.Random, seen: Seen) -> None:
    """num requests, AT_A_TIME at once; refused ones come again."""
    gate = asyncio.Semaphore(AT_A_TIME)
    limits = httpx.Limits(max_connections=AT_A_TIME, max_keepalive_connections=AT_A_TIME)

    async with httpx.AsyncClient(base_url=served.url, timeout=600, trust_env=False, limits=limits) as client:

        async def gated(i: int) -> None:
            async with gate:
                await one(client, rng, seen, leaves=i % LEAVES == 0)

        await asyncio.gather(*(gated(i) for i in range(num)))


def tell(*lines: str) -> None:
    """Show figures (`make soak` runs with -s)."""
    sys.stdout.write("\n" + "\n".join(lines) + "\n")


async def idle(served: Served) -> None:
    """Until nothing runs or waits."""
    for _ in range(600):
        names = ("num_requests_running", "num_requests_waiting")
        if not any([await asyncio.to_thread(served.metric, name) for name in names]):
            return
        await asyncio.sleep(0.1)
    pytest.fail("requests are still running a minute after the last client left")


async def test_load_with_clients_that_leave(served: Served) -> None:
    rng, seen = random.Random(4), Seen()
    rss = []
    for _ in range(QUARTERS):
        await load(served, NUM_REQUESTS // QUARTERS, rng, seen)
        await idle(served)
        rss.append(served.rss_mib())
    assert served.metric("tape_queue_depth") >= 0
    assert served.stop() == 0

    reader = Reader.open(served.data_dir)
    rows: Counter[str] = Counter()
    finish: Counter[str] = Counter()
    for row, steps in reader.every_choice(["outcome"]):
        outcomes = Counter(steps["outcome"].to_pylist())
        written = sum(n for outcome, n in outcomes.items() if outcome not in ("rejected", "discarded"))
        rows[row["request_id"]] += written
        assert row["completion_tokens"] == written, row["request_id"]
        finish[row["finish_reason"]] += 1
    reader.close()
    sent, generated = sum(seen.tokens.values()), sum(rows.values())
    growth = rss[-1] / rss[0] - 1
    tell(
        f"{NUM_REQUESTS} requests, {AT_A_TIME} at a time: {dict(seen.ended)}",
        f"choices by finish reason: {dict(finish)}",
        f"output rows on the tape {generated} = {sent} tokens sent + {generated - sent} unsent",
        f"RSS after each quarter {', '.join(f'{mib:.0f}' for mib in rss)} MiB ({growth:+.1%})",
    )
    assert set(seen.ended) <= {"complete", "left"}
    assert sum(seen.ended.values()) == NUM_REQUESTS
    assert seen.ended["left"] == NUM_REQUESTS // LEAVES
    assert None not in finish
    assert {trace_id: seen.tokens[trace_id] for trace_id in seen.complete} == {
        trace_id: rows[trace_id] for trace_id in seen.complete
    }
    assert all(seen.tokens[trace_id] <= rows[trace_id] for trace_id in seen.tokens)
    assert growth < 0.05


def test_no_generated_request_breaks_the_schema(served: Served, tmp_path: Path) -> None:
    tool = os.environ.get("SCHEMATHESIS") or shutil.which("schemathesis")
    if tool is None:
        pytest.skip("schemathesis is not installed (see CONTRIBUTING)")
    run = subprocess.run(
        [
            *(tool, "run", f"{served.url}/openapi.json", "--checks", CHECKS, "--max-examples", "30"),
            *("--phases", "coverage,fuzzing", "--request-timeout", "120", "--no-color"),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    tell(run.stdout[-3000:])
    generated = re.search(r"(\d+) generated", run.stdout)
    assert generated is not None
    assert int(generated[1]) >= 2000
    assert run.returncode == 0

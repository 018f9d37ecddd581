"""What drafting ahead hides: tokens/s with the large model behind a network of known latency.

A second tokentape serves the pair's large model in a process of its own; a proxy on loopback holds back what
passes between the two for half of the latency each way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.bench.workloads import CHAT
from gateway.config import Config, EngineConfig, ModelsConfig, RemoteConfig
from gateway.core import Delta, Mode, Sampling
from gateway.journal import set_up_log
from gateway.loading import Loaded, load_small
from gateway.policy import Policy
from gateway.request import Request
from gateway.scheduler import Scheduler
from gateway.worker import Worker

MAX_MODEL_LEN = 1024
REPEATS = 3


@dataclass(frozen=True, slots=True)
class Setting:
    """One column. adapt: the cap of each call's drafts comes from the measured round trip."""

    name: str
    policy: Policy
    draft_ahead: bool = True
    adapt: bool = False


SETTINGS = (
    Setting("large only", Policy(mode=Mode.LARGE_ONLY)),
    Setting("5 drafts", Policy(lookup=False), draft_ahead=False),
    Setting("5 drafts, ahead", Policy(lookup=False)),
    Setting("up to 32, ahead", Policy(lookup=False, draft_length=32), adapt=True),
)


def table(delays_ms: Sequence[int], rows: Sequence[int], preset: str, num_tokens: int) -> Iterator[str]:
    """Lines of a Markdown table: tokens/s of each setting by latency and rows, medians of three rounds."""
    set_up_log("warning")
    yield "| latency | rows | " + " | ".join(setting.name for setting in SETTINGS) + " |"
    yield "| --- " * (len(SETTINGS) + 2) + "|"
    with _engine(preset) as url:
        for delay_ms in delays_ms:
            with _delayed(url, delay_ms / 1000) as slow:
                loaded = load_small(_config(preset, slow, max(rows)), timed=True)
                try:
                    for num in rows:
                        yield _line(loaded, delay_ms, num, num_tokens)
                finally:
                    loaded.close()


def _line(loaded: Loaded, delay_ms: int, num_rows: int, num_tokens: int) -> str:
    found: dict[str, list[float]] = {setting.name: [] for setting in SETTINGS}
    for _ in range(REPEATS):
        for setting in SETTINGS:
            found[setting.name].append(_tokens_per_s(loaded, setting, num_rows, num_tokens))
    medians = [f"{statistics.median(speeds):.0f}" for speeds in found.values()]
    return f"| {delay_ms} ms | {num_rows} | " + " | ".join(medians) + " |"


def _tokens_per_s(loaded: Loaded, setting: Setting, num_rows: int, num_tokens: int) -> float:
    engine = loaded.engine(
        Scheduler(0.0, 256),
        num_rows,
        MAX_MODEL_LEN,
        load=loaded.load() if setting.adapt else None,
        draft_ahead=setting.draft_ahead,
    )
    worker = Worker(engine, loaded.served)
    ended, written = threading.Semaphore(0), [0]
    failed: list[str] = []

    def deliver(delta: Delta) -> None:
        written[0] += len(delta.steps)
        if delta.finished is not None:
            failed.extend([delta.finished.error] if delta.finished.error else [])
            ended.release()

    worker.start()
    began = time.perf_counter()
    for i in range(num_rows):
        worker.submit(_request(loaded, setting, i, num_tokens), deliver)
    for _ in range(num_rows):
        ended.acquire()
    seconds = time.perf_counter() - began
    worker.stop()
    if failed:
        raise RuntimeError(f"a request failed: {failed[0]}")
    return written[0] / seconds


def _request(loaded: Loaded, setting: Setting, i: int, num_tokens: int) -> Request:
    prompt = loaded.tokenizer.encode(CHAT[i % len(CHAT)])[-256:]
    return Request(
        id=f"bench-{i}-{time.monotonic_ns()}",
        choice=0,
        prompt_ids=tuple(prompt),
        sampling=Sampling(max_tokens=num_tokens, seed=i, temperature=0.0, ignore_eos=True),
        policy=setting.policy,
        policy_name="bench",
        received=time.time(),
    )


def _config(preset: str, url: str, max_rows: int) -> Config:
    return Config(
        models=ModelsConfig(preset=preset),
        remote=RemoteConfig(engine="openai", base_url=url),
        engine=EngineConfig(max_rows=max_rows, max_model_len=MAX_MODEL_LEN),
    )


@contextlib.contextmanager
def _engine(preset: str) -> Iterator[str]:
    """A second tokentape, its URL."""
    command = (sys.executable, "-m", "gateway.cli", "serve", "--no-ui", "--port", "0", "--preset", preset)
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.Popen(
            [*command, "--data-dir", str(Path(folder) / "tape")],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert child.stdout is not None
        try:
            ready = next((line for line in child.stdout if line.startswith("ready ")), None)
            if ready is None:
                raise RuntimeError("the second gateway did not start")
            yield ready.split()[1]
        finally:
            child.terminate()
            child.wait()


@contextlib.contextmanager
def _delayed(url: str, delay_s: float) -> Iterator[str]:
    """A TCP proxy before `url` that holds every piece back for half of delay_s, and its URL."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    loop = asyncio.new_event_loop()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(65536):
                await asyncio.sleep(delay_s / 2)
                writer.write(piece)
                await writer.drain()
        writer.close()

    async def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pump(reader, back), pump(there, writer))

    server: Any = loop.run_until_complete(asyncio.start_server(joined, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(_end(asyncio.all_tasks(loop)))
        loop.close()


async def _end(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

"""How a gateway starts, drains and stops; the worker is a fake, the signals are real."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_worker import FakeWorker

from gateway.app import URL_FILE, Gateway, listen, url_of
from gateway.config import Config, ConfigError, LogsConfig, ModelsConfig, ServerConfig
from logs.reader import Reader

TEXT = {"model": "tiny", "prompt": "hi", "max_tokens": 3}


def config(data_dir: Path, **server: Any) -> Config:
    return Config(
        models=ModelsConfig(preset="tiny"),
        server=ServerConfig(ui=False, port=0, **server),
        logs=LogsConfig(data_dir=str(data_dir)),
    )


class Running:
    """A gateway in this thread's event loop."""

    def __init__(self, settings: Config) -> None:
        self.worker = FakeWorker()
        self.gateway = Gateway(settings, self._load)
        self.listener = listen("127.0.0.1", 0)
        self.ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self.gateway.run(self.listener, self.ready.set_result))

    def _load(self, observers: Any) -> Any:
        self.worker.observers = observers
        return self.worker

    async def __aenter__(self) -> Running:
        self.url = await self.ready
        self.http = httpx.AsyncClient(base_url=self.url, timeout=10, trust_env=False, verify=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self.task.done():
            os.kill(os.getpid(), signal.SIGTERM)
        await self.task
        await self.http.aclose()
        self.listener.close()

    async def running(self) -> None:
        """Until a request is in the worker's hands."""
        await asyncio.to_thread(self.worker.wait_for, lambda: bool(self.worker.jobs))

    async def draining(self) -> None:
        """Until the signal has been taken."""
        while not self.gateway.service.draining:
            await asyncio.sleep(0)


async def test_it_says_where_it_listens_and_answers(tmp_path: Path) -> None:
    async with Running(config(tmp_path)) as running:
        assert url_of(running.listener) == running.url == (tmp_path / URL_FILE).read_text()
        assert (await running.http.get("/ready")).status_code == 200
        assert (await running.http.post("/v1/completions", json=TEXT)).status_code == 200
    assert not (tmp_path / URL_FILE).exists()


async def test_a_signal_lets_running_requests_finish_and_refuses_new_ones(tmp_path: Path) -> None:
    async with Running(config(tmp_path)) as running:
        running.worker.hold = True
        answer = asyncio.create_task(running.http.post("/v1/completions", json=TEXT))
        await running.running()
        os.kill(os.getpid(), signal.SIGTERM)
        await running.draining()
        refused = await running.http.post("/v1/completions", json=TEXT)
        assert refused.status_code == 503
        running.worker.advance(3)
        assert (await answer).status_code == 200
        trace_id = (await answer).json()["id"]
    reader = Reader.open(tmp_path)
    trace = reader.trace(trace_id)
    reader.close()
    assert trace is not None
    assert trace["finish_reason"] == "length", "the tape was flushed"


async def test_what_outlives_the_drain_is_ended_with_an_error(tmp_path: Path) -> None:
    async with Running(config(tmp_path, drain_s=0.1)) as running:
        running.worker.hold = True
        whole = asyncio.create_task(running.http.post("/v1/completions", json=TEXT))
        stream = asyncio.create_task(running.http.post("/v1/completions", json={**TEXT, "stream": True}))
        await asyncio.to_thread(running.worker.wait_for, lambda: len(running.worker.jobs) == 2)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await whole).status_code == 503
        assert '"error"' in (await stream).text


async def test_a_failed_load_is_raised_and_lets_go_of_everything(tmp_path: Path) -> None:
    def load(observers: Any) -> Any:
        raise ConfigError("models.small: no such model")

    gateway = Gateway(config(tmp_path), load)
    with listen("127.0.0.1", 0) as listener, pytest.raises(ConfigError, match=r"models\.small"):
        await gateway.run(listener, pytest.fail)
    Reader.open(tmp_path).close()


def test_a_taken_port_is_a_config_error() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"server\.port.*{port}: Address already in use$"):
            listen("127.0.0.1", port)
        with pytest.raises(ConfigError, match=rf"^server\.ui_port: .*{port}: Address already in use$"):
            listen("127.0.0.1", port, "server.ui_port")

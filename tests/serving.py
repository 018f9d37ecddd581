"""A gateway over real HTTP for the API's tests: uvicorn on a free port, in a thread of this process."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import uvicorn
from fake_worker import FakeWorker

from gateway.access import Keyring
from gateway.api.http import build_http
from gateway.api.service import Service
from gateway.config import Config, ModelsConfig
from gateway.metrics import Metrics
from logs.recorder import Recorder

TINY = Config(models=ModelsConfig(preset="tiny"))


class PromptServer(uvicorn.Server):
    """uvicorn, which looks every tenth of a second whether it is to stop and gives its clients another to
    leave; this one is told, and waits only for clients that are there."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._started = threading.Event()

    def stop(self) -> None:
        """From another thread: finish what is under way, then end."""
        self._started.wait()
        self._loop.call_soon_threadsafe(self._told.set)

    async def main_loop(self) -> None:
        self._loop, self._told = asyncio.get_running_loop(), asyncio.Event()
        self._started.set()
        await self.on_tick(0)
        await self._told.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)
        else:
            for server in self.servers:
                server.close()


@contextmanager
def serving(service: Service, send_buffer: int | None = None) -> Iterator[str]:
    """The service's URL while it is served; send_buffer: bytes the sockets hold for a client."""
    app = build_http(service)
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    server = PromptServer(uvicorn.Config(app, lifespan="off", ws="none", log_config=None, access_log=False))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    host, port = listener.getsockname()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()
        thread.join()
        listener.close()


class FakeGateway:
    """A service over a FakeWorker, its URL and an HTTP client."""

    def __init__(self, service: Service, worker: FakeWorker, url: str) -> None:
        self.service = service
        self.worker = worker
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=10, trust_env=False, verify=False)

    def post(self, path: str, body: dict[str, object], **more: object) -> httpx.Response:
        """POST a JSON body."""
        return self.http.post(path, json=body, **more)


@contextmanager
def fake_gateway(
    config: Config = TINY,
    data_dir: Path | None = None,
    send_buffer: int | None = None,
    keys: Keyring | None = None,
    clock: Callable[[], float] = time.time,
) -> Iterator[FakeGateway]:
    """A gateway without models; with a tape when data_dir is given."""
    recorder = None
    if data_dir is not None:
        recorder = Recorder(data_dir, gateway=config.fleet.name, share=config.fleet.share)
    metrics = Metrics()
    worker = FakeWorker(observers=[metrics] if recorder is None else [recorder, metrics])
    service = Service(
        config=config,
        metrics=metrics,
        model_name="tiny",
        recorder=recorder,
        engine=worker,
        keys=keys or Keyring(),
        clock=clock,
    )
    try:
        with serving(service, send_buffer) as url:
            gateway = FakeGateway(service, worker, url)
            yield gateway
            gateway.http.close()
    finally:
        if recorder is not None:
            recorder.close()

"""A small HTTP/1.1 proxy between a gateway and its engine that delays, drops and spoils what passes."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

Spoil = Callable[[str, bytes], "tuple[int, dict[str, str], bytes] | None"]
"""(path, the engine's answer) -> what is sent instead; None drops the connection without an answer."""


class FaultProxy:
    """delay_s: half before the engine is asked, half before its answer is passed on. spoil: see Spoil."""

    def __init__(self, target: str) -> None:
        self.delay_s = 0.0
        self.spoil: Spoil | None = None
        self.refuse: tuple[int, dict[str, str]] | None = None
        self.calls: list[tuple[str, dict[str, str]]] = []
        self._target = target

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        headers = {
            k.decode(): v.decode() for k, v in scope["headers"] if k not in (b"host", b"content-length")
        }
        self.calls.append((scope["path"], headers))
        await asyncio.sleep(self.delay_s / 2)
        if self.refuse is not None:
            status, more_headers, answer = *self.refuse, b"{}"
        else:
            async with httpx.AsyncClient(timeout=30, trust_env=False, verify=False) as http:
                url = f"{self._target}{scope['path']}"
                real = await http.request(scope["method"], url, content=body, headers=headers)
            status, more_headers, answer = real.status_code, {}, real.content
            if self.spoil is not None:
                spoilt = self.spoil(scope["path"], answer)
                if spoilt is None:
                    # A body that is shorter than announced is a connection that broke.
                    more_headers = {"content-length": str(len(answer) + 100)}
                else:
                    status, more_headers, answer = spoilt
        await asyncio.sleep(self.delay_s / 2)
        length = {"content-length": str(len(answer)), "content-type": "application/json", **more_headers}
        raw = [(k.encode(), v.encode()) for k, v in length.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": answer})


@contextmanager
def proxied(target: str) -> Iterator[tuple[FaultProxy, str]]:
    """A proxy before `target`, and its URL."""
    proxy = FaultProxy(target)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(
            proxy, lifespan="off", ws="none", log_config=None, access_log=False, log_level="critical"
        )
    )
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    host, port = listener.getsockname()
    try:
        yield proxy, f"http://{host}:{port}"
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join()
        listener.close()

"""Answers sent as they are made, which notice a client who left and a client who stopped reading."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec
from litestar import Response
from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def event(data: Any) -> bytes:
    """One SSE event with a JSON body."""
    return b"data: " + _encode(data) + b"\n\n"


async def disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    """Returns once the client has gone; the body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Stream(Response[bytes]):
    """A response that is sent as it is made, as Litestar's handlers return it; see `_Sender`."""

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        send_timeout_s: float,
        on_end: Callable[[], None],
        *,
        media_type: str,
        headers: dict[str, str],
    ) -> None:
        super().__init__(b"")
        self._sender = _Sender(chunks, send_timeout_s, on_end, media_type, headers)

    def to_asgi_response(self, *args: Any, **more: Any) -> ASGIResponse:
        """The ASGI application that sends the chunks."""
        return self._sender


class EventStream(Stream):
    """Server-sent events."""

    def __init__(
        self, events: AsyncGenerator[bytes, None], send_timeout_s: float, on_end: Callable[[], None]
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, send_timeout_s, on_end, media_type="text/event-stream", headers=headers)


class _Sender(ASGIResponse):
    """Sends the chunks of an async generator. On disconnect, or when one send takes longer than
    send_timeout_s, the generator is cancelled. on_end is called at the end whatever happens, also where the
    client left before the generator began (a `finally` inside it would not run then)."""

    __slots__ = ("_chunks", "_on_end", "_send_timeout_s")
    _should_set_content_length = False

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        send_timeout_s: float,
        on_end: Callable[[], None],
        media_type: str,
        headers: dict[str, str],
    ) -> None:
        super().__init__(media_type=media_type, headers=headers)
        self._chunks = chunks
        self._send_timeout_s = send_timeout_s
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()

    async def send_body(self, send: Send, receive: Receive) -> None:
        """Send until the chunks, the client or its patience end."""
        sending = asyncio.create_task(self._send_chunks(send))
        leaving = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            sending.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send_chunks(self, send: Send) -> None:
        try:
            async for chunk in self._chunks:
                async with asyncio.timeout(self._send_timeout_s):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._chunks.aclose()

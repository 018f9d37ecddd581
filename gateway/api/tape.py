"""The tape as a whole: what it holds, a stream of all of it, and its upkeep."""

from __future__ import annotations

import asyncio
import contextlib
import io
import threading
from collections.abc import AsyncGenerator, Callable
from typing import IO, Any, cast

import structlog
from litestar import Request, Response, get, post

from gateway.access import Scope
from gateway.api.bodies import read_query
from gateway.api.debugger import MEDIA
from gateway.api.errors import ApiError
from gateway.api.models import as_json
from gateway.api.route import Route
from gateway.api.service import Service, service_of
from gateway.api.stream import Stream
from gateway.api.traces import SETTLE_S, reader_of
from gateway.wire_debug import TapeExportQuery
from logs.export import stats, write
from logs.reader import STEP_COLUMNS, TraceFilter
from logs.recorder import Recorder

HttpRequest = Request[Any, Any, Any]
MOST_EXPORTS = 2
"""Exports at a time: each has a thread for as long as its client reads."""
CHUNK_BYTES = 256 * 1024
CHUNKS_AHEAD = 4

log = structlog.get_logger("gateway.tape")


@get("/v1/tape/stats", opt=Route(Scope.READ, returns=dict[str, Any]).opt)
async def get_stats(request: HttpRequest) -> Response[bytes]:
    """Rows, bytes, time span, answers by finish_reason, segments."""
    service = service_of(request.app.state)
    reader = reader_of(service)

    def read() -> dict[str, Any]:
        _settle(service)
        return stats(reader)

    return as_json(await asyncio.to_thread(read))


@post("/v1/tape/compact", status_code=200, opt=Route(Scope.ADMIN, returns=dict[str, Any]).opt)
async def compact_tape(request: HttpRequest) -> Response[bytes]:
    """Move every trace that ended a minute ago or earlier to Parquet, and drop what retention drops."""
    made, dropped = await asyncio.to_thread(_recorder(request).compact)
    names = {"made": made, "dropped": dropped}
    return as_json({key: [f"{s.dt}/{s.name}" for s in segments] for key, segments in names.items()})


@post("/v1/tape/recover", status_code=200, opt=Route(Scope.ADMIN, returns=dict[str, Any]).opt)
async def recover_tape(request: HttpRequest) -> Response[bytes]:
    """Read every segment through and set damaged ones aside; and what was set aside or found at the start."""
    recorder = _recorder(request)
    damaged = await asyncio.to_thread(recorder.recover)
    return as_json(
        {
            "damaged": [f"{segment.dt}/{segment.name}" for segment in damaged],
            "quarantined": [path.name for path in recorder.quarantined],
            "adopted": [f"{segment.dt}/{segment.name}" for segment in recorder.adopted],
        }
    )


@get("/v1/tape/export", opt=Route(Scope.READ, query=TapeExportQuery, also=dict.fromkeys(MEDIA.values())).opt)
async def export_tape(request: HttpRequest) -> Response[bytes]:
    """Every trace that the query lets through as one file, oldest first, sent as it is read."""
    service, query = service_of(request.app.state), read_query(request, TapeExportQuery)
    reader = reader_of(service)
    if service.num_exports >= MOST_EXPORTS:
        raise ApiError(503, f"{MOST_EXPORTS} exports are running", code="busy", headers={"retry-after": "30"})
    filters = TraceFilter(
        arm=query.arm, finish_reason=query.finish_reason, since=query.since, until=query.until, q=query.q
    )

    def fill(file: IO[bytes]) -> None:
        _settle(service)
        # pyarrow writes to whatever has write and tell.
        write(reader.every_choice(STEP_COLUMNS, filters), file, query.format)

    def on_end() -> None:
        service.num_exports -= 1

    service.num_exports += 1
    return Stream(
        _chunks(fill),
        service.config.server.send_timeout_s,
        on_end,
        media_type=MEDIA[query.format],
        headers={"content-disposition": f'attachment; filename="tape.{query.format}"'},
    )


class _Gone(OSError):
    """The client has left."""


class _Handing(io.RawIOBase):
    """A file whose bytes are handed to the event loop; write waits while the client is slow."""

    def __init__(self, hand_over: Callable[[bytes], None]) -> None:
        super().__init__()
        self._hand_over = hand_over
        self._written = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._written

    def write(self, data: Any) -> int:
        chunk = bytes(data)
        self._hand_over(chunk)
        self._written += len(chunk)
        return len(chunk)


async def _chunks(fill: Callable[[IO[bytes]], None]) -> AsyncGenerator[bytes, None]:
    """What fill writes, on a thread of its own, at most CHUNKS_AHEAD ahead of who reads."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | None] = asyncio.Queue(CHUNKS_AHEAD)
    gone = threading.Event()
    failed: list[Exception] = []

    def hand_over(chunk: bytes | None) -> None:
        if gone.is_set():
            raise _Gone
        asyncio.run_coroutine_threadsafe(queue.put(chunk), loop).result()

    def run() -> None:
        try:
            with io.BufferedWriter(_Handing(hand_over), CHUNK_BYTES) as file:
                fill(cast(IO[bytes], file))
        except _Gone:
            return
        except Exception as error:
            failed.append(error)
        with contextlib.suppress(_Gone):
            hand_over(None)

    thread = threading.Thread(target=run, name="tape-export", daemon=True)
    thread.start()
    try:
        while (chunk := await queue.get()) is not None:
            yield chunk
        if failed:
            # The status is out; a body without its end tells the client.
            log.error("tape_export_failed", error=f"{type(failed[0]).__name__}: {failed[0]}")
            raise failed[0]
    finally:
        gone.set()
        while thread.is_alive():
            # Whoever waits for room gets it, and meets `gone` at the next chunk.
            while not queue.empty():
                queue.get_nowait()
            await asyncio.sleep(0.01)


def _settle(service: Service) -> None:
    if service.engine is not None:
        service.engine.settle(SETTLE_S)


def _recorder(request: HttpRequest) -> Recorder:
    service = service_of(request.app.state)
    reader_of(service)
    assert service.recorder is not None
    return service.recorder

"""The gateway put together: tape, metrics, models, HTTP, replay UI; and how it starts and stops."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import structlog
import uvicorn

from alerts.config import MissingSecret
from alerts.follow import Control
from alerts.series import read_registry
from alerts.service import AlertsService
from gateway.access import Keyring
from gateway.api.http import build_http
from gateway.api.service import Service
from gateway.config import Config, ConfigError, FleetConfig
from gateway.metrics import Metrics
from gateway.worker import Observer, Worker
from logs.recorder import Recorder
from logs.redact import load as load_redaction
from logs.rows import Capture
from logs.upkeep import Keep
from replay_ui.serve import command

if TYPE_CHECKING:
    from gateway.telemetry import Telemetry

log = structlog.get_logger("gateway")

PR_SET_PDEATHSIG = 1
"""prctl(2): the signal a child gets when its parent ends."""

URL_FILE = "gateway.url"
"""Beside the tape: where the gateway that holds it listens."""

DRAIN_POLL_S = 0.05
CLOSE_S = 5
"""Seconds that open connections get after the last answer."""
KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections, so that it is they who close them."""
SETTLE_S = 5.0
"""Longest wait at the end for steps that still lack something."""
MAX_HEADER_BYTES = 65_536

Load = Callable[[Sequence[Observer]], Worker]


class Gateway:
    """One gateway process: `run` serves until a signal, drains, and returns.

    load makes the worker from the engine's observers, in a thread. Raises what opening the tape raises.
    """

    def __init__(self, config: Config, load: Load, keys: Keyring | None = None) -> None:
        self.config = config
        self._load = load
        metrics = Metrics()
        logs = config.logs
        recorder = Recorder(
            config.data_dir,
            queue_rows=logs.queue_rows,
            flush_rows=logs.flush_rows,
            flush_s=logs.flush_s,
            capture=Capture(logs.capture),
            decode=self._decode,
            redact=None if logs.redact is None else load_redaction(logs.redact),
            keep=Keep.of(logs.segment_mb, logs.retention_days, logs.retention_gb, _close_s(config)),
            gateway=config.fleet.name,
            share=config.fleet.share,
            on_flush=metrics.on_flush,
        )
        self.service = Service(
            config=config,
            metrics=metrics,
            model_name=config.served_name,
            recorder=recorder,
            keys=keys or Keyring(),
        )
        self._telemetry = _telemetry(config)
        self.service.telemetry = self._telemetry
        self._recorder = recorder
        self._worker: Worker | None = None
        self._server = _Server(
            uvicorn.Config(
                build_http(self.service),
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                timeout_graceful_shutdown=CLOSE_S,
                timeout_keep_alive=KEEP_ALIVE_S,
            ),
            self._drain_soon,
        )
        self._drains: asyncio.Task[None] | None = None

    async def run(self, listener: socket.socket, on_ready: Callable[[str], None]) -> None:
        """Serve on the socket; on_ready gets the URL once requests can be answered.

        Raises what loading the models raised.
        """
        url = url_of(listener)
        alerts = self._alerts_service(url)
        self.service.alerts = alerts
        observers: list[Observer] = [self._recorder, self.service.metrics, alerts.observer]
        if self._telemetry is not None:
            observers.append(self._telemetry)
        serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        loading = asyncio.create_task(asyncio.to_thread(self._load, observers))
        try:
            await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                self._take(loading.result(), alerts)
                url_file = self.config.data_dir / URL_FILE
                url_file.write_text(url, encoding="utf-8")
                on_ready(url)
                await serving
                url_file.unlink(missing_ok=True)
        finally:
            self._server.should_exit = True
            await asyncio.gather(serving, loading, return_exceptions=True)
            await asyncio.to_thread(self._close, None if loading.exception() else loading.result())

    def _alerts_service(self, url: str) -> AlertsService:
        """Rollouts and alerts over this tape; raises ConfigError where a receiver's secret is missing."""
        config, metrics = self.config, self.service.metrics
        ui = f"http://127.0.0.1:{config.server.ui_port}" if config.server.ui else None
        try:
            alerts = AlertsService(
                config=config.alerts,
                data_dir=config.data_dir,
                cursor=self._recorder.cursor,
                policies=config.policies,
                environ=os.environ,
                base_url=url,
                samples=lambda: read_registry(metrics.registry.collect()),
                queue_limit=config.engine.max_queue,
                num_middles=len(config.models.middle),
                trace_url=None if ui is None else f"{ui}/replay?trace={{id}}",
                advisor_url=None if ui is None else f"{ui}/advisor",
                name=config.fleet.name,
                control=_control(config.fleet, os.environ),
            )
        except MissingSecret as error:
            raise ConfigError(str(error)) from None
        metrics.watch_alerts(alerts.samples)
        if alerts.promoted is not None:
            log.info("promoted_policy", **alerts.promoted)
        return alerts

    def _take(self, worker: Worker, alerts: AlertsService) -> None:
        self._worker = worker
        self.service.engine = worker
        alerts.start()
        metrics = self.service.metrics
        metrics.watch_engine(lambda: worker.num_running, lambda: worker.num_waiting, lambda: worker.kv_usage)
        for large in worker.distant:
            metrics.watch_large(large)
        metrics.watch_tape(lambda: self._recorder.queue_depth, lambda: dict(self._recorder.dropped))
        share = self._recorder.share
        if share is not None:
            metrics.watch_share(lambda: share.last_sync)

    def _close(self, worker: Worker | None) -> None:
        try:
            if worker is not None:
                # Answers are out; what is left are last signals and audits.
                worker.stop(SETTLE_S)
                for large in worker.distant:
                    large.close()
                if self.service.alerts is not None:
                    self.service.alerts.stop()
        finally:
            self._recorder.close()
            if self._telemetry is not None:
                self._telemetry.close()

    def _drain_soon(self) -> None:
        """A signal came: stop taking requests, let the running ones finish; a second signal ends at once."""
        if self.service.draining:
            self._server.force_exit = self._server.should_exit = True
            return
        self.service.draining = True
        log.info("draining", running=len(self.service.running))
        self._drains = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.server.drain_s):
                while self.service.running:
                    await asyncio.sleep(DRAIN_POLL_S)
        for live in list(self.service.running.values()):
            live.cancel()
        self._server.should_exit = True

    def _decode(self, ids: Sequence[int]) -> str:
        """Token ids as text for the tape."""
        return "" if self._worker is None else self._worker.tokenizer.decode(ids, skip_special_tokens=False)


def _close_s(config: Config) -> float | None:
    """How often a fleet wants segments closed; None without one to send them to."""
    return None if config.fleet.share is None else config.fleet.close_s


def _control(fleet: FleetConfig, environ: Mapping[str, str]) -> Control | None:
    """Whom to follow; the key comes from the environment, and none is sent where none is there."""
    if fleet.control is None:
        return None
    return Control(fleet.control.rstrip("/"), environ.get(fleet.key_env) or None, fleet.silent_s)


def _telemetry(config: Config) -> Telemetry | None:
    """OpenTelemetry where it is configured; ConfigError without its extra."""
    if config.otel.endpoint is None:
        return None
    try:
        from gateway.telemetry import telemetry
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"otel.endpoint: needs the extra `otel` ({error.name} is missing): pip install 'tokentape[otel]'"
        ) from None
    return telemetry(config.otel, version("tokentape"), config.fleet.name)


class _Server(uvicorn.Server):
    """uvicorn, except that a signal drains first and is not raised again at the end."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_signal = on_signal
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until told to exit."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGINT or SIGTERM."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._on_signal)


def listen(host: str, port: int, key: str = "server.port") -> socket.socket:
    """A listening socket; ConfigError, naming the key, when the address cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        # create_server's own text repeats the address; gaierror has no errno of the system's.
        why = os.strerror(error.errno) if isinstance(error.errno, int) and error.errno > 0 else error
        raise ConfigError(f"{key}: cannot listen on {host}:{port}: {why}") from None


def url_of(listener: socket.socket) -> str:
    """http://H:N of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _die_with_parent() -> None:
    """In the child: a gateway that is killed outright must not leave a UI behind that holds its port."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def replay_ui_beside(url: str, port: int, data_dir: Path | None = None) -> Iterator[None]:
    """Run the replay UI as a child process, on loopback only, for as long as the block lasts."""
    # Its own session: a Ctrl+C in the terminal must reach the gateway first, which ends the UI last.
    child = subprocess.Popen(
        command(port, url, data_dir=data_dir),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_die_with_parent if sys.platform == "linux" else None,
    )
    try:
        yield
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

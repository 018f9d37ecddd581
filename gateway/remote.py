"""A command talking to a running gateway: where it listens, and its answers or its refusal in one line."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import httpx

from gateway.config import ConfigError, load_config

if TYPE_CHECKING:
    from logs.reader import Reader

JSON = "application/json"

KEY_VARIABLE = "TOKENTAPE_API_KEY"


def data_dir_of(given: str | None) -> Path:
    """The tape's folder: --data-dir, else the environment's or the default one."""
    return load_config(None, os.environ, {} if given is None else {"logs.data_dir": given}).data_dir


def running_gateway(data_dir: Path) -> str | None:
    """Where the gateway that holds this tape listens; None when none runs."""
    try:
        # A file left behind by a gateway that was killed says nothing; another one may listen there now.
        if not _is_held(data_dir):
            return None
        url = (data_dir / "gateway.url").read_text(encoding="utf-8").strip()
        httpx.get(f"{url}/health", timeout=5, trust_env=False).raise_for_status()
    except (OSError, httpx.HTTPError):
        return None
    return url


def _is_held(data_dir: Path) -> bool:
    """Whether a process has the tape open for writing; raises OSError where there never was one."""
    from logs.tape import LOCK

    with (data_dir / LOCK).open(encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def ask(
    url: str, method: str, path: str, *, body: Any = None, params: Any = None, timeout_s: float = 60.0
) -> Any:
    """The JSON that a gateway answers; ConfigError with its own words when it refuses or is not there.

    The API key is taken from $TOKENTAPE_API_KEY.
    """
    try:
        answer = httpx.request(
            method,
            url.rstrip("/") + path,
            json=body,
            params=params,
            headers=_headers(),
            timeout=timeout_s,
            trust_env=False,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"--url: no gateway answers at {url}: {error}") from None
    _raise_if_refused(answer, url)
    return answer.json() if answer.headers.get("content-type") == JSON else {}


def fetch(
    url: str, path: str, file: IO[bytes], *, params: Mapping[str, Any], timeout_s: float = 60.0
) -> None:
    """Write what a gateway sends to a GET into a file; ConfigError when it refuses, or stops before the end.

    timeout_s: longest silence.
    """
    try:
        with httpx.stream(
            "GET",
            url.rstrip("/") + path,
            params=params,
            headers=_headers(),
            timeout=timeout_s,
            trust_env=False,
        ) as answer:
            if answer.status_code >= 400:
                answer.read()
            _raise_if_refused(answer, url)
            for chunk in answer.iter_bytes():
                file.write(chunk)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"--url: the gateway at {url} did not answer to the end: {error}") from None


def tape_reader(data_dir: Path) -> Reader:
    """A reader of a tape that no gateway holds; ConfigError where there is none."""
    # Late, so that other commands do not wait for DuckDB and Arrow.
    import duckdb

    from logs.reader import Reader

    try:
        return Reader.open(data_dir)
    except duckdb.Error as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"--data-dir: the tape in {data_dir} cannot be opened: {first}") from None


def _headers() -> dict[str, str]:
    key = os.environ.get(KEY_VARIABLE)
    return {"authorization": f"Bearer {key}"} if key else {}


def _raise_if_refused(answer: httpx.Response, url: str) -> None:
    if answer.status_code >= 400:
        found = answer.json() if answer.headers.get("content-type") == JSON else {}
        said = found.get("error", {}).get("message", answer.reason_phrase)
        raise ConfigError(f"the gateway at {url} refused: {said}")

"""A command talking to a running gateway: where it listens, and its answers or its refusal in one line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx

from gateway.config import ConfigError, load_config

KEY_VARIABLE = "TOKENTAPE_API_KEY"


def data_dir_of(given: str | None) -> Path:
    """The tape's folder: --data-dir, else the environment's or the default one."""
    return load_config(None, os.environ, {} if given is None else {"logs.data_dir": given}).data_dir


def running_gateway(data_dir: Path) -> str | None:
    """Where the gateway that holds this tape listens; None when none runs."""
    try:
        url = (data_dir / "gateway.url").read_text(encoding="utf-8").strip()
        httpx.get(f"{url}/health", timeout=5, trust_env=False).raise_for_status()
    except (OSError, httpx.HTTPError):
        # A file left behind by a gateway that was killed says nothing.
        return None
    return url


def ask(
    url: str, method: str, path: str, *, body: Any = None, params: Any = None, timeout_s: float = 60.0
) -> Any:
    """The JSON that a gateway answers; ConfigError with its own words when it refuses or is not there.

    The API key is taken from $TOKENTAPE_API_KEY.
    """
    key = os.environ.get(KEY_VARIABLE)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.request(
            method,
            url.rstrip("/") + path,
            json=body,
            params=params,
            headers=headers,
            timeout=timeout_s,
            trust_env=False,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"--url: no gateway answers at {url}: {error}") from None
    is_json = answer.headers.get("content-type") == "application/json"
    found = answer.json() if is_json else {}
    if answer.status_code >= 400:
        said = found.get("error", {}).get("message", answer.reason_phrase)
        raise ConfigError(f"the gateway at {url} refused: {said}")
    return found

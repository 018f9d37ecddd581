"""The gateway's HTTP API as the pages use it; what goes wrong becomes one sentence and a next action."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx

from replay_ui.offline import TapeTransport, data_dir

DEFAULT_URL = "http://127.0.0.1:8000"


class Problem(Exception):
    """Why a page cannot show what was asked: `down`, `denied`, `absent`, `unsupported`, `refused`, `failed`.

    says: one sentence. then: what the reader can do about it.
    """

    def __init__(self, kind: str, says: str, then: str) -> None:
        super().__init__(says)
        self.kind = kind
        self.says = says
        self.then = then


def gateway_url() -> str:
    """Where the gateway is: the command line's `--gateway URL`, else $TOKENTAPE_URL, else loopback."""
    if "--gateway" in sys.argv[:-1]:
        return sys.argv[sys.argv.index("--gateway") + 1].rstrip("/")
    return os.environ.get("TOKENTAPE_URL", DEFAULT_URL).rstrip("/")


def transport() -> httpx.BaseTransport | None:
    """How requests travel; None is the network."""
    return None


@dataclass
class Gateway:
    """One gateway, asked over HTTP. key: bearer token, kept in memory only.

    offline: the last call was answered from the tape's files, because the gateway cannot be reached.
    """

    url: str
    key: str | None = None
    model: str | None = None
    offline: bool = False
    _texts: dict[int, str] = field(default_factory=dict)
    _http: httpx.Client | None = None

    def close(self) -> None:
        """Drop the connections."""
        if self._http is not None:
            self._http.close()
            self._http = None

    def ask(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        timeout: float = 30.0,
    ) -> httpx.Response:
        """One call; raises Problem for anything but success."""
        if self._http is None:
            self._http = httpx.Client(base_url=self.url, transport=transport(), trust_env=False)
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            answer = self._http.request(
                method, path, params=params, json=body, headers=headers, timeout=timeout
            )
        except httpx.TimeoutException:
            raise Problem(
                "failed",
                f"The gateway at {self.url} did not answer in {timeout:g} s.",
                "It may be busy: try again, or look at Live.",
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL):
            return self._from_tape(method, path, params, body)
        self.offline = False
        if answer.is_success:
            return answer
        raise _problem(answer, path)

    def _from_tape(
        self, method: str, path: str, params: Mapping[str, Any] | None, body: Any
    ) -> httpx.Response:
        down = Problem(
            "down",
            f"The gateway at {self.url} cannot be reached.",
            "Start it with `make serve` (or `tokentape serve`), or set TOKENTAPE_URL to where it runs.",
        )
        directory = data_dir()
        if directory is None or not directory.is_dir():
            raise down
        with httpx.Client(base_url=self.url, transport=TapeTransport(directory)) as tape:
            answer = tape.request(method, path, params=params, json=body)
        if answer.status_code == 503 or _problem(answer, path).kind == "unsupported":
            raise down
        self.offline = True
        if answer.is_success:
            return answer
        raise _problem(answer, path)

    def json(self, method: str, path: str, **how: Any) -> Any:
        """One call's JSON body."""
        return self.ask(method, path, **how).json()

    def traces(self, **filters: Any) -> tuple[list[dict[str, Any]], str | None]:
        """A page of summaries, newest first, and the cursor of the next one."""
        params = {name: value for name, value in filters.items() if value not in (None, "")}
        page = self.json("GET", "/v1/traces", params=params)
        return [_named(row) for row in page["data"]], page.get("next_cursor")

    def trace(self, trace_id: str) -> dict[str, Any]:
        """One trace's summary."""
        return _named(self.json("GET", _trace(trace_id)))

    def steps(self, trace_id: str, choice: int = 0) -> dict[str, list[Any]]:
        """The steps of one choice, as columns."""
        found: dict[str, list[Any]] = self.json("GET", _trace(trace_id, "steps"), params={"choice": choice})[
            "columns"
        ]
        return found

    def what_if(self, trace_id: str, overrides: Mapping[str, Any], choice: int = 0) -> dict[str, Any]:
        """The decisions that other settings would have taken on the recorded path."""
        params = {"choice": choice} if choice else None
        found: dict[str, Any] = self.json(
            "POST", _trace(trace_id, "what-if"), params=params, body={"routing": dict(overrides)}
        )
        return found

    def fork(
        self, trace_id: str, at: int, token_id: int | None, routing: Mapping[str, Any], choice: int = 0
    ) -> str:
        """Run the models again from output position `at`; the new trace's id."""
        params = {"choice": choice} if choice else None
        body: dict[str, Any] = {"at": at}
        if token_id is not None:
            body["token_id"] = token_id
        if routing:
            body["routing"] = dict(routing)
        path = _trace(trace_id, "fork")
        return str(self.json("POST", path, params=params, body=body, timeout=300.0)["id"])

    def diff(self, a: str, b: str) -> dict[str, Any]:
        """Two traces compared by the gateway."""
        found: dict[str, Any] = self.json("GET", _trace(a, "diff", b))
        return found

    def review(self, trace_id: str, verdict: str, note: str, reviewer: str) -> None:
        """Say what one thinks of an answer."""
        body = {"verdict": verdict, "note": note or None, "reviewer": reviewer or None}
        given = {name: value for name, value in body.items() if value is not None}
        self.ask("POST", _trace(trace_id, "reviews"), body=given)

    def texts(self, ids: Iterable[int]) -> dict[int, str]:
        """What each token id says, asked once a token."""
        wanted = [i for i in dict.fromkeys(ids) if i not in self._texts]
        for token in wanted:
            try:
                answer = self.json(
                    "POST", "/detokenize", body={"model": self._model(), "tokens": [token]}, timeout=5.0
                )
                self._texts[token] = str(answer["prompt"])
            except Problem as problem:
                if problem.kind == "down":
                    # Not remembered: the gateway may be back at the next step.
                    break
                if problem.kind == "denied":
                    raise
                self._texts[token] = f"#{token}"
        return self._texts

    def tokenize(self, text: str) -> list[int]:
        """Token ids of text, nothing added."""
        body = {"model": self._model(), "prompt": text, "add_special_tokens": False}
        return [int(t) for t in self.json("POST", "/tokenize", body=body)["tokens"]]

    def _model(self) -> str:
        if self.model is None:
            self.model = str(self.json("GET", "/v1/models")["data"][0]["id"])
        return self.model


def listed(answer: Any, name: str) -> list[dict[str, Any]]:
    """The rows of a list answer: a bare list, or under `data`, or under its own name."""
    if isinstance(answer, list):
        return answer
    rows: list[dict[str, Any]] = answer.get("data") or answer.get(name) or []
    return rows


def _named(summary: dict[str, Any]) -> dict[str, Any]:
    return {"id": summary.get("request_id"), **summary}


def _trace(trace_id: str, *rest: str) -> str:
    return "/".join(["/v1/traces", quote(trace_id, safe=""), *(quote(part, safe="") for part in rest)])


def _problem(answer: httpx.Response, path: str) -> Problem:
    try:
        error = answer.json()["error"]
        message, code = str(error["message"]), str(error.get("code"))
    except (ValueError, KeyError, TypeError):
        message, code = answer.text[:200], ""
    if answer.status_code in (401, 403):
        return Problem(
            "denied", "The gateway wants an API key for this.", "Enter one below; it stays in this tab."
        )
    if answer.status_code == 404:
        if path.startswith("/v1/traces/") and code == "trace_not_found":
            return Problem(
                "absent", "The tape holds no such trace.", "It may have been retired: pick one from Traces."
            )
        return Problem(
            "unsupported",
            f"This gateway has no {path.split('?')[0]}.",
            "Upgrade the gateway to use this page; the other pages work.",
        )
    if answer.status_code in (405, 501):
        return Problem("unsupported", f"This gateway has no {path}.", "Upgrade the gateway to use this page.")
    if answer.status_code < 500:
        return Problem("refused", f"The gateway refused: {message}", "Change the settings and try again.")
    return Problem(
        "failed", f"The gateway failed ({answer.status_code}): {message}", "Try again, or read its log."
    )

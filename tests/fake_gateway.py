"""A gateway without models for the UI tests: answers httpx requests (`transport`) or listens (`serving`)."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import httpx
from fake_answers import ADVICE, ALERTS, DELIVERIES, FINDINGS, METRICS, ROLLOUT
from fake_traces import NOW, TEXT, VOCABULARY, pieces, simulate, summary

from gateway.core import Accept, Action
from gateway.policy import Policy, f32


class FakeGateway:
    """Traces in memory. missing: path prefixes it answers with 404, as an older gateway would."""

    def __init__(self, missing: tuple[str, ...] = ()) -> None:
        self.traces: dict[str, tuple[dict[str, Any], dict[str, list[Any]]]] = {}
        self.missing = missing
        self.key: str | None = None
        self.calls: list[tuple[str, str, Any]] = []
        self.reviews: list[dict[str, Any]] = []
        self.rollouts = [deepcopy(ROLLOUT)]
        self.alerts = deepcopy(ALERTS)

    def add(
        self, trace_id: str, tokens: list[bytes], policy: Policy | None = None, seed: int = 0, **more: Any
    ) -> None:
        """Decode tokens under policy and keep the trace."""
        policy = policy or Policy(protect_first=4)
        columns = simulate(tokens, policy, seed)
        columns["request_id"] = [trace_id] * len(columns["seq"])
        self.traces[trace_id] = (summary(trace_id, columns, policy, **more), columns)

    def answer(
        self, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, str, bytes]:
        """Status, content type and body for one request."""
        url = urlsplit(target)
        query = dict(parse_qsl(url.query))
        given = json.loads(body) if body else None
        self.calls.append((method, target, given))
        if self.key and headers.get("authorization") != f"Bearer {self.key}":
            return self._error(401, "Missing or wrong API key", "invalid_api_key")
        if any(url.path.startswith(prefix) for prefix in self.missing):
            return self._error(404, f"No such path: {url.path}", "not_found")
        if url.path == "/metrics":
            return 200, "text/plain", METRICS.encode()
        found = self._route(method, url.path, query, given)
        if isinstance(found, tuple):
            return found
        return 200, "application/json", json.dumps(found).encode()

    def _route(self, method: str, path: str, query: dict[str, str], body: Any) -> Any:
        parts = path.strip("/").split("/")
        if path == "/v1/traces":
            return self._page(query)
        if path == "/v1/models":
            return {"data": [{"id": "tiny", "max_model_len": 2048}]}
        if path == "/detokenize":
            return {
                "prompt": b"".join(VOCABULARY.tokens[t] for t in body["tokens"]).decode("utf-8", "replace")
            }
        if path == "/tokenize":
            tokens = [VOCABULARY[t] for t in pieces(body["prompt"])]
            return {"count": len(tokens), "max_model_len": 2048, "tokens": tokens}
        if path == "/v1/advisor":
            return ADVICE
        if path == "/v1/diagnose":
            return {"data": FINDINGS}
        if path == "/v1/rollouts":
            return {"data": self.rollouts}
        if parts[:2] == ["v1", "rollouts"] and method == "POST":
            self.rollouts[0]["verdict"] = {"abort": "aborted", "promote": "promoted"}[parts[3]]
            return self.rollouts[0]
        if path == "/v1/alerts":
            return self.alerts
        if path == "/v1/alerts/silences":
            self.alerts["silences"].append({"id": "s1", "ends_at": NOW + 7200, **body})
            return self.alerts["silences"][-1]
        if parts[:3] == ["v1", "alerts", "silences"] and method == "DELETE":
            self.alerts["silences"].clear()
            return {}
        if path == "/v1/webhooks/deliveries":
            return {"data": DELIVERIES}
        if path.endswith("/redeliver"):
            return DELIVERIES[0]
        if path == "/v1/reviews/sample":
            reviewed = {r["id"] for r in self.reviews}
            return {
                "data": [s for s, _ in self.traces.values() if s["id"] not in reviewed][
                    : int(query.get("n", 50))
                ]
            }
        parts = [unquote(part) for part in parts]
        if parts[:2] == ["v1", "traces"] and len(parts) > 2:
            if parts[2] not in self.traces:
                return self._error(404, f"No trace {parts[2]}", "trace_not_found")
            return self._trace(method, parts[2], parts[3:], query, body)
        return self._error(404, f"No such path: {path}", "not_found")

    def _page(self, query: dict[str, str]) -> dict[str, Any]:
        rows = sorted((s for s, _ in self.traces.values()), key=lambda s: -s["received"])
        for name in ("arm", "finish_reason"):
            if name in query:
                rows = [s for s in rows if s[name] == query[name]]
        if "q" in query:
            rows = [s for s in rows if query["q"] in s["prompt_preview"] + s["answer_text"]]
        start = int(query.get("cursor") or 0)
        stop = start + int(query.get("limit", 50))
        return {"data": rows[start:stop], "next_cursor": str(stop) if stop < len(rows) else None}

    def _trace(self, method: str, trace_id: str, rest: list[str], query: dict[str, str], body: Any) -> Any:
        row, columns = self.traces[trace_id]
        if not rest:
            return row
        if rest == ["steps"]:
            return {"columns": columns}
        if rest == ["what-if"]:
            return self._what_if(row, columns, body["routing"])
        if rest == ["fork"]:
            at = body["at"]
            tokens = [
                VOCABULARY.tokens[columns["token_id"][i]]
                for i, o in enumerate(columns["outcome"])
                if o not in {"rejected", "discarded"}
            ]
            if "token_id" in body:
                tokens[at] = VOCABULARY.tokens[body["token_id"]]
            self.add(f"{trace_id}-fork{at}", tokens, seed=3, parent=trace_id, forked_at=at)
            return {"id": f"{trace_id}-fork{at}"}
        if rest[0] == "diff":
            return self._diff(trace_id, rest[1])
        if rest == ["reviews"]:
            self.reviews.append({"id": trace_id, **body})
            return {"id": trace_id}
        return self._error(404, f"No such path: {'/'.join(rest)}", "not_found")

    def _what_if(
        self, row: dict[str, Any], columns: dict[str, list[Any]], routing: dict[str, Any]
    ) -> dict[str, Any]:
        settings = dict(row["policy"])
        policy = Policy(**{**settings, "accept": Accept(settings["accept"])})
        other = replace(policy, **{k: v for k, v in routing.items() if k != "accept"})
        flips, decisions = [], []
        for i, action in enumerate(columns["action"]):
            if action is None:
                continue
            idx, gap = columns["idx"][i], columns["gap"][i]
            early = Action.DEFER if idx < other.protect_first else None
            new = str(early or (Action.KEEP if gap >= f32(other.threshold) else Action.DEFER))
            if columns["reason"][i] in {"draft_full", "run_limit"}:
                new = "defer"
            decisions.append({"idx": idx, "action": new, "reason": columns["reason"][i]})
            if new != action:
                flips.append(idx)
        kept = sum(d["action"] == "keep" for d in decisions) / max(len(decisions), 1)
        return {
            "first_flip": flips[0] if flips else None,
            "flips": flips,
            "decisions": decisions,
            "estimate": {
                "kept_share": kept,
                "recorded_kept_share": 0.67,
                "agreement": 0.981,
                "low": 0.972,
                "high": 0.988,
                "labels": 1204,
            },
        }

    def _diff(self, a: str, b: str) -> dict[str, Any]:
        def out(trace: str) -> list[int]:
            columns = self.traces[trace][1]
            return [i for i, o in enumerate(columns["outcome"]) if o not in {"rejected", "discarded"}]

        left, right = self.traces[a][1], self.traces[b][1]
        ids_a = [left["token_id"][i] for i in out(a)]
        ids_b = [right["token_id"][i] for i in out(b)]
        first = next((i for i, (x, y) in enumerate(zip(ids_a, ids_b, strict=False)) if x != y), None)
        if first is None and len(ids_a) != len(ids_b):
            first = min(len(ids_a), len(ids_b))
        return {"first_divergence": first, "steps": []}

    @staticmethod
    def _error(status: int, message: str, code: str) -> tuple[int, str, bytes]:
        body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
        return status, "application/json", json.dumps(body).encode()

    def transport(self) -> httpx.MockTransport:
        """An httpx transport that asks this gateway."""

        def handle(request: httpx.Request) -> httpx.Response:
            status, kind, body = self.answer(
                request.method, str(request.url.raw_path, "ascii"), dict(request.headers), request.content
            )
            return httpx.Response(status, content=body, headers={"content-type": kind})

        return httpx.MockTransport(handle)

    @contextmanager
    def serving(self, port: int = 0) -> Iterator[str]:
        """Listen on loopback for as long as the block runs; yields the base URL."""
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def _do(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                headers = {k.lower(): v for k, v in self.headers.items()}
                status, kind, out = gateway.answer(self.command, self.path, headers, body)
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(out)))
                self.end_headers()
                self.wfile.write(out)

            do_GET = do_POST = do_DELETE = _do

            def log_message(self, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def demo(long: bool = False) -> FakeGateway:
    """A few traces with something to see in each; with `long`, one of 10,000 tokens as well."""
    fake = FakeGateway()
    words = pieces(TEXT)
    fake.add("chatcmpl-8f2c", words, seed=5)
    fake.add(
        "chatcmpl-trust",
        words,
        Policy(protect_first=4, accept=Accept.TRUST),
        seed=11,
        arm="canary",
        policy_name="balanced",
    )
    other = [*words[:60], b" or", *words[60:120]]
    fake.add("chatcmpl-other", other, Policy(protect_first=4, threshold=0.3), seed=4)
    strict = Policy(protect_first=10, threshold=0.8)
    fake.add("chatcmpl-strict", words, strict, seed=5, received=NOW - 4000)
    hostile = [
        b"<script>alert(1)</script>",
        b"<img src=x onerror=alert(2)>",
        "\u202eevil".encode(),
        b"\x1b[31mred",
        b"](javascript:alert(3))",
        b"$\\frac{1}{0}$",
        b"&lt;b&gt;",
        "\u05e2\u05d1\u05e8\u05d9\u05ea".encode(),
        b"z" * 100_000,
        b"\x00",
        b"`'\"",
    ]
    fake.add(
        "chatcmpl-hostile",
        hostile,
        seed=2,
        prompt_preview="<script>alert('p')</script> **bold** \u202ertl",
        prompt_text="<script>alert('p')</script>" * 50,
    )
    if long:
        unguarded = Policy(protect_first=4, loop_limit=0)
        numbered = [part for i in range(80) for part in [*words, b" %d" % i]]
        fake.add("chatcmpl-long", numbered[:10_000], unguarded, seed=9, received=NOW - 9000)
    return fake


if __name__ == "__main__":
    with demo(long=True).serving(8900):
        threading.Event().wait()

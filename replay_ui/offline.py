"""The tape read without a gateway: the live file where nothing holds it, and the closed Parquet segments.

Answers the calls that only read (`/v1/traces`, a trace, its steps) as the gateway would; it never writes.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import httpx

if TYPE_CHECKING:
    import duckdb

_JSON = ("policy", "sampling", "params", "stop")
_HEAVY = ("prompt_ids", "prompt_text", "answer_text", "params")
_KEYS = {"requests": "request_id, choice", "steps": "request_id, choice, seq"}


def data_dir() -> Path | None:
    """Where the tape is: the command line's `--data-dir`, else $TOKENTAPE_LOGS_DATA_DIR, else not known."""
    named = os.environ.get("TOKENTAPE_LOGS_DATA_DIR")
    if "--data-dir" in sys.argv[:-1]:
        named = sys.argv[sys.argv.index("--data-dir") + 1]
    return Path(named) if named else None


class TapeTransport(httpx.BaseTransport):
    """Answers from the tape in a directory; what needs a gateway is a 404."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """One call; 503 where the tape cannot be read."""
        import duckdb

        parts = [unquote(part) for part in request.url.raw_path.decode().partition("?")[0].split("/")[1:]]
        if request.method != "GET" or parts[:2] != ["v1", "traces"] or len(parts) > 4:
            return _refusal(404, "This needs a running gateway", "not_found")
        try:
            return self._read(parts[2:], request.url.params)
        except (duckdb.Error, OSError) as error:
            return _refusal(503, f"The tape in {self.directory} cannot be read: {error}", "not_ready")

    def _read(self, rest: Sequence[str], params: httpx.QueryParams) -> httpx.Response:
        with self._connect() as tape:
            if not rest:
                return httpx.Response(200, json=_page(tape, params))
            found = _rows(tape, "SELECT * FROM requests WHERE request_id = ? ORDER BY choice", [rest[0]])
            if not found:
                return _refusal(404, "There is no such trace", "trace_not_found")
            if len(rest) == 1:
                return httpx.Response(200, json={**found[0], "num_choices": len(found), "choices": found})
            if rest[1] != "steps":
                return _refusal(404, "This needs a running gateway", "not_found")
            return httpx.Response(200, json={"columns": _steps(tape, rest[0], int(params.get("choice", 0)))})

    def _connect(self) -> duckdb.DuckDBPyConnection:
        import duckdb

        tape = duckdb.connect()
        live = self.directory / "tape.duckdb"
        attached = False
        if live.exists():
            try:
                quoted = str(live).replace("'", "''")
                tape.execute(f"ATTACH '{quoted}' AS live (READ_ONLY)")
                attached = True
            except duckdb.Error:
                # A gateway holds it, or it is damaged: the closed segments can still be read.
                attached = False
        for table, key in _KEYS.items():
            sources = [f"SELECT * FROM live.{table}"] if attached else []
            # Its own segments, and in a fleet the copies of others'.
            closed = [
                path
                for folder in (self.directory, *sorted((self.directory / "fleet").glob("*")))
                for path in sorted((folder / "segments" / table).glob("dt=*/*.parquet"))
            ]
            if closed:
                names = ", ".join("'" + str(path).replace("'", "''") + "'" for path in closed)
                sources.append(
                    f"SELECT * FROM read_parquet([{names}], union_by_name = true, hive_partitioning = false)"
                )
            if not sources:
                tape.close()
                raise OSError("nothing there that can be read (a gateway may hold the live file)")
            tape.execute(
                f"CREATE TEMP VIEW {table} AS SELECT * FROM ({' UNION ALL BY NAME '.join(sources)}) "
                f"QUALIFY row_number() OVER (PARTITION BY {key}) = 1"
            )
        return tape


def _page(tape: duckdb.DuckDBPyConnection, params: httpx.QueryParams) -> dict[str, Any]:
    clauses = {
        "arm": "arm = ?",
        "finish_reason": "finish_reason = ?",
        "since": "received >= ?",
        "until": "received < ?",
        "min_guard_hits": "guard_hits >= ?",
        "max_acceptance": "draft_acceptance_rate <= ?",
        "cursor": "trace_no < ?",
        "gateway": "gateway = ?",
    }
    used = [(clauses[name], value) for name, value in params.items() if name in clauses]
    if params.get("q"):
        used.append(
            ("contains(lower(concat_ws(' ', request_id, prompt_text, answer_text)), ?)", params["q"].lower())
        )
    where = " AND ".join(["choice = 0", *(clause for clause, _ in used)])
    limit = int(params.get("limit", 50))
    rows = _rows(
        tape,
        f"SELECT * EXCLUDE ({', '.join(_HEAVY)}) FROM requests WHERE {where} ORDER BY trace_no DESC LIMIT ?",
        [*(value for _, value in used), limit + 1],
    )
    more = len(rows) > limit
    return {"data": rows[:limit], "next_cursor": str(rows[limit - 1]["trace_no"]) if more else None}


def _rows(tape: duckdb.DuckDBPyConnection, sql: str, values: Sequence[object]) -> list[dict[str, Any]]:
    query = tape.execute(sql, values)
    names = [column[0] for column in query.description or ()]
    rows = [dict(zip(names, row, strict=True)) for row in query.fetchall()]
    for row in rows:
        for name in _JSON:
            if isinstance(row.get(name), str):
                row[name] = json.loads(row[name])
    return rows


def _steps(tape: duckdb.DuckDBPyConnection, trace: str, choice: int) -> dict[str, list[Any]]:
    query = tape.execute(
        "SELECT * EXCLUDE (trace_no) FROM steps WHERE request_id = ? AND choice = ? ORDER BY seq",
        [trace, choice],
    )
    names = [column[0] for column in query.description or ()]
    rows = query.fetchall()
    columns = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    tokens = columns["token_bytes"]
    columns["token_bytes"] = [None if t is None else base64.b64encode(t).decode() for t in tokens]
    return columns


def _refusal(status: int, message: str, code: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message, "code": code}})

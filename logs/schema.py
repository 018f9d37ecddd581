"""The tape's tables: every column with its types and meaning, versions and additive migrations."""

from __future__ import annotations

from dataclasses import dataclass

import duckdb
import pyarrow as pa

VERSION = 5
"""Schema version this code writes; it opens and reads every earlier one."""


class TapeTooNew(Exception):
    """The tape was written by a later version of tokentape than this one."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its name, DuckDB type, meaning with unit, and the schema version that added it."""

    name: str
    sql: str
    doc: str
    since: int = 1


MIDDLE: tuple[Column, ...] = (
    Column("tier", "VARCHAR", "`middle`, `middle2` or `middle3`"),
    Column(
        "verdict",
        "VARCHAR",
        "what it made of the draft: `accepted`, `rejected`, `recovered` (its own token instead); "
        "or without one: `bonus` (after a full draft), `own` (the tier below had deferred), `passed` (it "
        "deferred unasked)",
    ),
    Column("choice", "INTEGER", "its own token"),
    Column("p", "FLOAT", "its probability of the token it judged, or put"),
    Column("top1_p", "FLOAT", "probability of its top token"),
    Column("gap", "FLOAT", "top1_p minus the runner-up's probability"),
    Column("entropy", "FLOAT", "entropy, nats"),
    Column("attn_entropy", "FLOAT", "mean attention entropy of its last layer, nats"),
    Column("topk_ids", "INTEGER[]", "top tokens, most likely first"),
    Column("topk_logprobs", "FLOAT[]", "their log-probabilities, nats"),
    Column("action", "VARCHAR", "`keep`: a draft for the next tier; `defer`; null on a rejected draft"),
    Column("reason", "VARCHAR", "the rule that decided"),
    Column("score", "FLOAT", "routing score of its own signals, 0..1"),
    Column("threshold", "FLOAT", "score from which it keeps, 0..1"),
    Column("draft_pos", "INTEGER", "its drafts that already waited for the next tier"),
    Column("draft_limit", "INTEGER", "most of those"),
    Column("run_length", "INTEGER", "as on the step, when it decided"),
    Column("ema_acceptance", "FLOAT", "running acceptance of its drafts by the next tier, 0..1"),
    Column("guard_value", "FLOAT", "as on the step, of the token it decided about"),
    Column("probe_u", "FLOAT", "uniform draw of the probe, 0..1"),
    Column("fact_value", "FLOAT", "1 where that token looks like part of a fact, else 0"),
    Column("decision_no", "INTEGER", "as on the step"),
    Column("pass_id", "BIGINT", "its model pass; 0 where it was not asked"),
)
"""The fields of one entry of `steps.middle`."""

_MIDDLE = f"STRUCT({', '.join(f'{field.name} {field.sql}' for field in MIDDLE)})[]"

_ARROW: dict[str, pa.DataType] = {
    "BIGINT": pa.int64(),
    "INTEGER": pa.int32(),
    "DOUBLE": pa.float64(),
    "FLOAT": pa.float32(),
    "VARCHAR": pa.string(),
    "BLOB": pa.binary(),
    "BOOLEAN": pa.bool_(),
    "INTEGER[]": pa.list_(pa.int32()),
    "FLOAT[]": pa.list_(pa.float32()),
    "VARCHAR[]": pa.list_(pa.string()),
}
_ARROW[_MIDDLE] = pa.list_(pa.struct([(field.name, _ARROW[field.sql]) for field in MIDDLE]))

REQUESTS: tuple[Column, ...] = (
    Column("trace_no", "BIGINT", "number of the request on this tape, in order of admission; never reused"),
    Column("request_id", "VARCHAR", "the trace id"),
    Column("choice", "INTEGER", "0, 1, 2, ... within the request (`n`, prompt lists)"),
    Column("endpoint", "VARCHAR", "path that was called"),
    Column("model", "VARCHAR", "model name as the client gave it"),
    Column("arm", "VARCHAR", "`stable` or `canary`"),
    Column("policy_name", "VARCHAR", "`[policy.<name>]` the request started from"),
    Column("policy_hash", "VARCHAR", "12 hex digits of the policy in force, overrides applied"),
    Column("policy", "VARCHAR", "that policy, JSON, every field"),
    Column("seed", "BIGINT", "seed of the sampling noise (null beyond 64 bits; `sampling` has it exactly)"),
    Column("sampling", "VARCHAR", "sampling parameters, JSON, every field"),
    Column("params", "VARCHAR", "the client's body, JSON, as received"),
    Column("prompt_ids", "INTEGER[]", "token ids of the prompt"),
    Column("prompt_text", "VARCHAR", "the prompt as the models see it"),
    Column("prompt_preview", "VARCHAR", "first 200 characters of the last user message, or of the prompt"),
    Column("prompt_tokens", "INTEGER", "length of the prompt, tokens"),
    Column("num_topk", "INTEGER", "top tokens kept of each model per step"),
    Column("parent", "VARCHAR", "trace this one was forked from"),
    Column("forked_at", "INTEGER", "output position at which it was forked"),
    Column("small_model", "VARCHAR", "name of the small model"),
    Column("large_model", "VARCHAR", "name of the large model"),
    Column("small_hash", "VARCHAR", "hash of the small model's weights"),
    Column("large_hash", "VARCHAR", "hash of the large model's weights"),
    Column("router_hash", "VARCHAR", "hash of the learned router, where there is one"),
    Column("numerics", "VARCHAR", "device/dtype/quantization of the models"),
    Column("version", "VARCHAR", "version of tokentape that served the request"),
    Column("received", "DOUBLE", "request received, Unix seconds"),
    Column("admitted", "DOUBLE", "slot given, Unix seconds"),
    Column("first_token", "DOUBLE", "first output token committed, Unix seconds"),
    Column("finished", "DOUBLE", "last output token committed, Unix seconds"),
    Column(
        "finish_reason", "VARCHAR", "`stop`, `length`, `abort`, `error`; null while running or interrupted"
    ),
    Column("stop", "VARCHAR", "stop string or token id that ended the answer, JSON"),
    Column("error", "VARCHAR", "message, where finish_reason is `error`"),
    Column("answer_text", "VARCHAR", "the answer (empty until the end)"),
    Column("completion_tokens", "INTEGER", "output tokens"),
    Column("small_tokens", "INTEGER", "output tokens written by the small model"),
    Column("large_tokens", "INTEGER", "output tokens written by the large model"),
    Column("lookup_tokens", "INTEGER", "output tokens copied by lookup"),
    Column("protected_tokens", "INTEGER", "output tokens of the protected prefix"),
    Column("num_drafts", "INTEGER", "verified draft runs"),
    Column("num_draft_tokens", "INTEGER", "drafted tokens"),
    Column("num_accepted_draft_tokens", "INTEGER", "drafted tokens that the large model let stand"),
    Column("guard_hits", "INTEGER", "positions deferred by a guard"),
    Column("large_passes", "INTEGER", "large-model passes with a row of this choice"),
    Column("small_passes", "INTEGER", "small-model passes with a row of this choice"),
    Column("deferral_rate", "DOUBLE", "large_tokens / completion_tokens, 0..1"),
    Column("draft_acceptance_rate", "DOUBLE", "num_accepted_draft_tokens / num_draft_tokens, 0..1"),
    Column("mean_acceptance_length", "DOUBLE", "1 + accepted tokens per draft run, tokens"),
    Column("min_gap", "FLOAT", "lowest gap over the output, probability"),
    Column("gap_spark", "FLOAT[]", "the gap over the output as at most 32 means, probability"),
    Column("audited_tokens", "INTEGER", "output tokens not written by the large model that it has examined"),
    Column("audit_agreements", "INTEGER", "those of them that are its own choice"),
    Column(
        "audit_status",
        "VARCHAR",
        "audit of unverified tokens: `not_chosen`, `complete`, `lost`; null until settled",
    ),
    Column("capture", "VARCHAR", "capture level: `full`, `no_prompt` or `signals`"),
    Column("incomplete", "BOOLEAN", "later steps were dropped (full queue, failed write)"),
    Column("interrupted", "BOOLEAN", "the gateway ended before the request did"),
    Column("gateway", "VARCHAR", "`[fleet] name` of the gateway that served it, if it has one", since=3),
    Column(
        "user_hash",
        "VARCHAR",
        "16 hex digits of the running rollout's salt and the sticky key; null without either",
        since=3,
    ),
    Column("kind", "VARCHAR", "what the prompt asks for: `code`, `short`, `reasoning`, `other`", since=4),
    Column("middle_models", "VARCHAR[]", "names of the middle models, weakest first", since=5),
    Column("middle_hashes", "VARCHAR[]", "hashes of their weights", since=5),
    Column("middle_tokens", "INTEGER", "output tokens written by middle models", since=5),
    Column("middle_passes", "INTEGER", "middle-model passes with a row of this choice", since=5),
)

STEPS: tuple[Column, ...] = (
    Column("trace_no", "BIGINT", "the request's number (prunes a trace to its row groups)"),
    Column("request_id", "VARCHAR", "the trace id"),
    Column("choice", "INTEGER", "choice within the request"),
    Column("idx", "INTEGER", "output position, from 0"),
    Column("seq", "INTEGER", "row number within the choice, from 0; (request_id, choice, seq) is the key"),
    Column("round", "INTEGER", "draft-and-verify round within the choice"),
    Column("draft_pos", "INTEGER", "tokens already waiting in the round when this position was decided"),
    Column("tick", "BIGINT", "engine tick that committed the row"),
    Column("token_id", "INTEGER", "the row's token"),
    Column("token_bytes", "BLOB", "exact bytes the token adds to the text"),
    Column("tier", "VARCHAR", "who wrote it: `small`, `middle`, `middle2`, `middle3`, `large`, `lookup`"),
    Column("action", "VARCHAR", "`keep` or `defer`; null where nothing was decided"),
    Column("reason", "VARCHAR", "the rule that decided"),
    Column("score", "FLOAT", "routing score, 0..1"),
    Column("threshold", "FLOAT", "score from which the small model's token is kept, 0..1"),
    Column("top1_p", "FLOAT", "small model: probability of its top token"),
    Column("gap", "FLOAT", "small model: top1_p minus the runner-up's probability"),
    Column("entropy", "FLOAT", "small model: entropy, nats"),
    Column("attn_entropy", "FLOAT", "small model: mean attention entropy of the last layer, nats"),
    Column("run_length", "INTEGER", "consecutive tokens before this one not written by the large model"),
    Column("ema_acceptance", "FLOAT", "running acceptance of this choice's drafts, 0..1"),
    Column("draft_limit", "INTEGER", "most drafts this round, tokens"),
    Column("guard_value", "FLOAT", "times the output already held the n-gram the proposal would complete"),
    Column("large_used", "INTEGER", "tokens the large model had written before"),
    Column("probe_u", "FLOAT", "uniform draw of the probe, 0..1"),
    Column("propensity", "FLOAT", "probability that this row got its label, 0..1"),
    Column("small_choice", "INTEGER", "the small model's own proposal (x), token id"),
    Column("small_topk_ids", "INTEGER[]", "small model: top tokens, most likely first"),
    Column("small_topk_logprobs", "FLOAT[]", "small model: their log-probabilities, nats"),
    Column("large_topk_ids", "INTEGER[]", "large model: top tokens, most likely first"),
    Column("large_topk_logprobs", "FLOAT[]", "large model: their log-probabilities, nats"),
    Column("p_large", "FLOAT", "large model: probability of the row's token"),
    Column("large_choice", "INTEGER", "the large model's own token at this position (y)"),
    Column(
        "outcome",
        "VARCHAR",
        "`kept`, `accepted`, `recovered`, `bonus`, `large`, `forced`: output; `rejected`, `discarded`: not. "
        "A `bonus` behind a deferred token that rode along was nobody's decision: `action` is null",
    ),
    Column("audit_agrees", "BOOLEAN", "whether the row's token is the large model's choice"),
    Column("audit_source", "VARCHAR", "what found that out: `verify`, `catchup`, `posthoc`, `shadow`"),
    Column("pass_id", "BIGINT", "model pass that committed the row"),
    Column("batch_rows", "INTEGER", "rows in that pass"),
    Column("small_kv", "INTEGER", "small model's KV length, tokens"),
    Column("large_kv", "INTEGER", "large model's KV length, tokens"),
    Column("latency_us", "BIGINT", "model time of the pass that settled the row, microseconds"),
    Column("ts", "DOUBLE", "when the row was committed, Unix seconds"),
    Column("fact_value", "FLOAT", "1 where the proposal looks like part of a fact, else 0", since=2),
    Column("hidden", "BLOB", "small model: last hidden state, float16, where a router reads it", since=4),
    Column("large_entropy", "FLOAT", "large model: entropy, nats", since=4),
    Column("large_attn_entropy", "FLOAT", "large model: as attn_entropy, nats", since=4),
    Column("middle", _MIDDLE, "what the middle tiers said and decided, weakest first; null without", since=5),
    Column(
        "decision_no",
        "INTEGER",
        "number of the decision among all of this choice, where middle tiers decide too",
        since=5,
    ),
    Column("overruled_by", "VARCHAR", "the tier that rejected the row's token", since=5),
)

PASSES: tuple[Column, ...] = (
    Column("pass_id", "BIGINT", "number of the pass since the gateway started"),
    Column("tick", "BIGINT", "engine tick"),
    Column("tier", "VARCHAR", "model that ran: `small`, `middle`, `middle2`, `middle3` or `large`"),
    Column("rows", "INTEGER", "rows (choices) in the pass"),
    Column("tokens", "INTEGER", "new tokens over all rows"),
    Column("context_tokens", "BIGINT", "KV tokens read over all rows"),
    Column("ms", "DOUBLE", "model time until its logits are read, milliseconds"),
    Column("host_ms", "DOUBLE", "time around the model in that tick, milliseconds"),
    Column("adapted", "BOOLEAN", "whether load changed what was run"),
    Column("ts", "DOUBLE", "end of the pass, Unix seconds"),
)

SCORES: tuple[Column, ...] = (
    Column("request_id", "VARCHAR", "the trace scored"),
    Column("name", "VARCHAR", "task metric"),
    Column("value", "DOUBLE", "0..1"),
    Column("ts", "DOUBLE", "when it was reported, Unix seconds"),
)

REVIEWS: tuple[Column, ...] = (
    Column("request_id", "VARCHAR", "the trace reviewed"),
    Column("verdict", "VARCHAR", "`good`, `bad` or `unsure`"),
    Column("note", "VARCHAR", "reviewer's words"),
    Column("reviewer", "VARCHAR", "who reviewed"),
    Column("ts", "DOUBLE", "when, Unix seconds"),
)

SEGMENTS: tuple[Column, ...] = (
    Column("name", "VARCHAR", "file name under segments/<table>/dt=<day>/"),
    Column("dt", "VARCHAR", "UTC day of the partition, YYYY-MM-DD"),
    Column("first_no", "BIGINT", "lowest trace_no within"),
    Column("last_no", "BIGINT", "highest trace_no within"),
    Column("num_requests", "BIGINT", "rows of requests"),
    Column("num_steps", "BIGINT", "rows of steps"),
    Column("num_passes", "BIGINT", "rows of passes"),
    Column("bytes", "BIGINT", "size on disk, bytes"),
    Column("first_ts", "DOUBLE", "earliest `finished` within, Unix seconds"),
    Column("last_ts", "DOUBLE", "latest `finished` within, Unix seconds"),
    Column("gateway", "VARCHAR", "gateway of the fleet that made it; null: this one", since=3),
)

MOVED: tuple[Column, ...] = (
    Column("request_id", "VARCHAR", "a trace that left the live tables"),
    Column("trace_no", "BIGINT", "its number"),
    Column("name", "VARCHAR", "segment that holds it"),
    Column("dt", "VARCHAR", "partition of that segment"),
    Column("gateway", "VARCHAR", "gateway of the fleet that made that segment; null: this one", since=3),
)

ROLLOUTS: tuple[Column, ...] = (
    Column("name", "VARCHAR", "the rollout"),
    Column("salt", "VARCHAR", "its salt; (salt, number) is the key"),
    Column("number", "INTEGER", "number of the transition within the rollout, from 0"),
    Column("ts", "DOUBLE", "when, Unix seconds"),
    Column("event", "VARCHAR", "what happened: `started`, `step`, `paused`, `rolled_back`, ..."),
    Column("verdict", "VARCHAR", "verdict after it"),
    Column("step", "INTEGER", "step after it, from 0"),
    Column("weight", "DOUBLE", "share of keys on the canary after it, 0..1"),
    Column("paused", "BOOLEAN", "whether it is paused after it"),
    Column("reason", "VARCHAR", "why, in words"),
    Column("canary_units", "BIGINT", "canary units observed so far"),
    Column("stable_units", "BIGINT", "stable units observed so far"),
    Column("against", "DOUBLE", "combined evidence against the canary"),
    Column("plan", "VARCHAR", "what the rollout was asked to do, JSON"),
)

ALERTS: tuple[Column, ...] = (
    Column("ts", "DOUBLE", "when the state changed, Unix seconds"),
    Column("fingerprint", "VARCHAR", "names the alert: equal labels, equal fingerprint"),
    Column("name", "VARCHAR", "the alert's name"),
    Column("state", "VARCHAR", "`firing` or `resolved`"),
    Column("labels", "VARCHAR", "its labels, JSON"),
    Column("annotations", "VARCHAR", "what it says, JSON"),
)

DELIVERIES: tuple[Column, ...] = (
    Column("id", "VARCHAR", "webhook-id, the same for every attempt"),
    Column("receiver", "VARCHAR", "`[[alerts.receivers]]` it is for"),
    Column("subject", "VARCHAR", "alert or rollout it is about"),
    Column("body", "VARCHAR", "what is sent, JSON, before it takes the receiver's shape"),
    Column("state", "VARCHAR", "`pending`, `delivered`, `failed` (given up) or `disabled` (answered 410)"),
    Column("created", "DOUBLE", "when it was put here, Unix seconds"),
    Column("attempts", "INTEGER", "requests made so far"),
    Column("next_try", "DOUBLE", "when it is tried next, Unix seconds"),
    Column("status", "INTEGER", "HTTP status of the last attempt"),
    Column("error", "VARCHAR", "what went wrong with the last attempt"),
    Column("url", "VARCHAR", "host the last attempt went to"),
    Column("finished", "DOUBLE", "when it left `pending`, Unix seconds"),
)

TABLES: dict[str, tuple[Column, ...]] = {
    "requests": REQUESTS,
    "steps": STEPS,
    "passes": PASSES,
    "scores": SCORES,
    "reviews": REVIEWS,
    "segments": SEGMENTS,
    "moved": MOVED,
    "rollouts": ROLLOUTS,
    "alerts": ALERTS,
    "deliveries": DELIVERIES,
}


def arrow_schema(table: str) -> pa.Schema:
    """The table's Arrow schema, columns in table order."""
    return pa.schema([(column.name, _ARROW[column.sql]) for column in TABLES[table]])


def names(table: str) -> tuple[str, ...]:
    """The table's column names, in order."""
    return tuple(column.name for column in TABLES[table])


def version_of(connection: duckdb.DuckDBPyConnection) -> int:
    """The schema version of an open tape; raises TapeTooNew for one this code does not know."""
    row = connection.execute("SELECT max(version) FROM tape_version").fetchone()
    version: int = (row[0] if row else None) or 0
    if version > VERSION:
        raise TapeTooNew(
            f"the tape has schema version {version}, this tokentape knows {VERSION}: upgrade tokentape"
        )
    return version


def migrate(connection: duckdb.DuckDBPyConnection) -> int:
    """Bring an empty or older tape to VERSION, adding tables and columns only; returns the version found.

    0 means the tape was new. Raises TapeTooNew for a version this code does not know.
    """
    connection.begin()
    try:
        connection.execute("CREATE TABLE IF NOT EXISTS tape_version (version INTEGER)")
        found = version_of(connection)
        # The first look into DuckDB's catalog takes longer than all the rest: a new tape needs none.
        _add_missing(connection, _present(connection) if found else [])
        if found < VERSION:
            connection.execute("DELETE FROM tape_version")
            connection.execute("INSERT INTO tape_version VALUES (?)", [VERSION])
        connection.commit()
    except BaseException:
        connection.rollback()
        raise
    return found


def _present(connection: duckdb.DuckDBPyConnection) -> list[tuple[str, str]]:
    """Table and name of every column there is."""
    return connection.execute("SELECT table_name, column_name FROM information_schema.columns").fetchall()


def _add_missing(connection: duckdb.DuckDBPyConnection, columns: list[tuple[str, str]]) -> None:
    present = set(columns)
    tables = {table for table, _ in columns}
    for table, wanted in TABLES.items():
        if table not in tables:
            body = ", ".join(f'"{column.name}" {column.sql}' for column in wanted)
            connection.execute(f'CREATE TABLE "{table}" ({body})')
            continue
        for column in wanted:
            if (table, column.name) not in present:
                connection.execute(f'ALTER TABLE "{table}" ADD COLUMN "{column.name}" {column.sql}')

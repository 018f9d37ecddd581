"""The tape's tables and their versions."""

import re
from pathlib import Path

import duckdb
import pytest

from logs import schema


def columns(connection, table):
    rows = connection.execute(f"DESCRIBE {table}").fetchall()
    return [(row[0], row[1]) for row in rows]


def test_a_new_tape_has_every_table_and_column():
    connection = duckdb.connect()

    assert schema.migrate(connection) == 0

    for table, expected in schema.TABLES.items():
        # DuckDB quotes the fields of a struct that could be keywords.
        found = [(name, kind.replace('"', "")) for name, kind in columns(connection, table)]
        assert [(c.name, c.sql) for c in expected] == found
    assert connection.execute("SELECT version FROM tape_version").fetchall() == [(schema.VERSION,)]


def test_the_current_version_is_left_alone():
    connection = duckdb.connect()
    schema.migrate(connection)

    assert schema.migrate(connection) == schema.VERSION


def test_an_older_tape_gains_what_it_lacks_and_keeps_its_rows(monkeypatch):
    connection = duckdb.connect()
    schema.migrate(connection)
    connection.execute("INSERT INTO scores VALUES ('r', 'exact match', 1.0, 5.0)")
    older = schema.VERSION
    monkeypatch.setattr(schema, "VERSION", older + 1)
    added = schema.Column("grader", "VARCHAR", "who graded", since=older + 1)
    monkeypatch.setitem(schema.TABLES, "scores", (*schema.SCORES, added))

    assert older == schema.migrate(connection)

    assert connection.execute("SELECT * FROM scores").fetchall() == [("r", "exact match", 1.0, 5.0, None)]


def test_a_later_tape_is_refused():
    connection = duckdb.connect()
    schema.migrate(connection)
    connection.execute("UPDATE tape_version SET version = 999")

    with pytest.raises(schema.TapeTooNew, match="version 999"):
        schema.migrate(connection)


def test_steps_has_every_promised_column():
    """The columns that scripts of users rely on, by name."""
    promised = """
        request_id choice idx seq round draft_pos tick token_id token_bytes tier action reason score
        threshold top1_p gap entropy attn_entropy run_length ema_acceptance draft_limit guard_value large_used
        probe_u propensity small_topk_ids small_topk_logprobs large_topk_ids large_topk_logprobs p_large
        large_choice outcome audit_agrees audit_source pass_id batch_rows small_kv large_kv latency_us ts
    """

    assert set(promised.split()) <= set(schema.names("steps"))


@pytest.mark.parametrize("table", schema.TABLES)
def test_every_column_is_documented(table):
    text = (Path(schema.__file__).parent / "README.md").read_text(encoding="utf-8")
    section = text.split(f"\n### `{table}`", 1)[1].split("\n### ", 1)[0]
    documented = dict(re.findall(r"^\| `(\w+)` \| `[^`]+` \| (.+) \|$", section, re.MULTILINE))

    assert {c.name: c.doc for c in schema.TABLES[table]} == documented

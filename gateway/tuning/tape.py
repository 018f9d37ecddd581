"""What a tape teaches: audited positions as examples for a router, disagreements as training data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import duckdb
import pyarrow as pa

from gateway.config import ConfigError
from gateway.core import UNWRITTEN, Outcome
from gateway.text import Tokenizer
from gateway.tuning.judge import Examples
from gateway.tuning.learn import tape_examples
from logs.reader import Reader

_EXAMPLE_COLUMNS = (
    "request_id", "idx", "top1_p", "gap", "entropy", "attn_entropy", "run_length", "ema_acceptance",
    "small_choice", "large_choice", "propensity",
)  # fmt: skip
_EXPORT_COLUMNS = (
    "idx", "seq", "outcome", "token_id", "small_choice", "large_choice", "score", "gap", "audit_source",
)  # fmt: skip


@contextmanager
def tape_at(data_dir: Path) -> Iterator[Reader]:
    """A reader of a tape that no gateway holds; ConfigError where it cannot be opened."""
    try:
        reader = Reader.open(data_dir)
    except duckdb.Error as error:
        line = str(error).splitlines()[0]
        raise ConfigError(f"the tape in {data_dir} cannot be opened: {line}") from None
    try:
        yield reader
    finally:
        reader.close()


def labelled(data_dir: Path, *, hidden: bool = False) -> Examples:
    """Every position of the tape where both models' choices are known, weighted by 1/propensity.

    hidden: only those with a hidden state, and that with them.
    """
    names = (*_EXAMPLE_COLUMNS, "hidden") if hidden else _EXAMPLE_COLUMNS
    with tape_at(data_dir) as reader:
        present = " AND ".join(
            f"{name} IS NOT NULL" for name in names if name not in ("attn_entropy", "propensity")
        )
        found = reader.query(
            f"SELECT {', '.join(names)} FROM {reader.sql('steps', (*names, 'outcome'))} WHERE {present}"
            " AND outcome NOT IN ('recovered', 'discarded', 'forced')"
        )
    return tape_examples({name: found[name].to_pylist() for name in names})


def write_disagreements(data_dir: Path, tokenizer: Tokenizer, file: IO[str]) -> int:
    """Write a JSON line for each position where the models' own tokens differ; how many there are.

    request_id, choice, idx; context: prompt and answer before it, null where the tape keeps no text;
    context_ids: the same as token ids; small, large: both tokens as text, small_id, large_id; score, gap.
    """
    count = 0
    with tape_at(data_dir) as reader:
        for row, steps in reader.every_choice(_EXPORT_COLUMNS):
            found = list(_differing(steps))
            if not found:
                continue
            prompt = _prompt(reader, row["request_id"], row["choice"])
            output = _output(steps)
            for step in found:
                file.write(json.dumps(_line(row, step, prompt, output, tokenizer)) + "\n")
                count += 1
    return count


def _differing(steps: pa.Table) -> Iterator[dict[str, Any]]:
    for step in steps.to_pylist():
        x, y = step["small_choice"], step["large_choice"]
        # A recovered token repeats its rejected draft.
        if x is not None and y is not None and x != y and step["outcome"] != Outcome.RECOVERED:
            yield step


def _prompt(reader: Reader, request_id: str, choice: int) -> list[int] | None:
    row = next(row for row in reader.choices(request_id) if row["choice"] == choice)
    ids: list[int] | None = row.get("prompt_ids")
    return ids


def _output(steps: pa.Table) -> dict[int, int]:
    """Output token by position."""
    columns = (steps[name].to_pylist() for name in ("idx", "outcome", "token_id"))
    return {
        idx: token for idx, outcome, token in zip(*columns, strict=True) if Outcome(outcome) not in UNWRITTEN
    }


def _line(
    row: dict[str, Any],
    step: dict[str, Any],
    prompt: list[int] | None,
    output: dict[int, int],
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    context = None if prompt is None else [*prompt, *(output[i] for i in range(step["idx"]))]
    return {
        "request_id": row["request_id"],
        "choice": row["choice"],
        "idx": step["idx"],
        "context": None if context is None else tokenizer.decode(context, skip_special_tokens=False),
        "context_ids": context,
        "small": tokenizer.decode([step["small_choice"]], skip_special_tokens=False),
        "large": tokenizer.decode([step["large_choice"]], skip_special_tokens=False),
        "small_id": step["small_choice"],
        "large_id": step["large_choice"],
        "score": step["score"],
        "gap": step["gap"],
        "audit_source": step["audit_source"],
    }

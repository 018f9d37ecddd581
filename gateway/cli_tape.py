"""`tokentape tape`: the log store; through the running gateway when that holds the file."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import structlog

from gateway.config import ConfigError, load_config
from gateway.remote import ask, data_dir_of, fetch, running_gateway, tape_reader

if TYPE_CHECKING:
    from logs.export import Format
    from logs.recorder import Recorder

TIMEOUT_S = 3600.0
"""A whole tape may take a while."""
FORMATS: dict[str, Format] = {"jsonl": "jsonl", "parquet": "parquet"}
FILTERS = ("arm", "finish_reason", "since", "until", "q")


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("tape", help="the log store: export, compact, recover, stats")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    export = verbs.add_parser("export", help="traces with their steps as one file")
    export.add_argument("--out", type=Path, metavar="F", help="a new file; by default standard output")
    export.add_argument("--format", choices=list(FORMATS), help="by default what F ends with, else jsonl")
    export.add_argument("--arm", metavar="A", help="only traces of this arm")
    export.add_argument("--finish-reason", metavar="R", help="only traces that ended like this")
    export.add_argument("--since", type=float, metavar="T", help="only traces received from then on (Unix s)")
    export.add_argument("--until", type=float, metavar="T", help="only traces received before (Unix s)")
    export.add_argument("--q", metavar="TEXT", help="only traces with this text in them")
    _common(export, _export)
    compact = verbs.add_parser(
        "compact", help="move traces that ended over a minute ago to Parquet; drop what retention drops"
    )
    _common(compact, _compact)
    recover = verbs.add_parser("recover", help="look for damage and set it aside, so that the rest reads")
    _common(recover, _recover)
    _common(verbs.add_parser("stats", help="what the tape holds, as JSON"), _stats)


def _common(parser: argparse.ArgumentParser, run: Any) -> None:
    parser.add_argument("--url", metavar="U", help="the gateway that holds the tape")
    parser.add_argument("--data-dir", metavar="D", help="folder of the tape, where no gateway holds it")
    parser.set_defaults(run=run)


def _export(arguments: argparse.Namespace) -> int:
    out: Path | None = arguments.out
    suffix = "" if out is None else out.suffix.removeprefix(".")
    form = FORMATS[arguments.format or (suffix if suffix in FORMATS else "jsonl")]
    filters = {name: value for name in FILTERS if (value := getattr(arguments, name)) is not None}
    data_dir, url = _where(arguments)
    with _new_file(out) as file:
        if url is not None:
            fetch(url, "/v1/tape/export", file, params={"format": form, **filters}, timeout_s=TIMEOUT_S)
            return 0
        from logs.export import write
        from logs.reader import STEP_COLUMNS, TraceFilter

        with contextlib.closing(tape_reader(data_dir)) as reader:
            write(reader.every_choice(STEP_COLUMNS, TraceFilter(**filters)), file, form)
    return 0


@contextlib.contextmanager
def _new_file(out: Path | None) -> Iterator[IO[bytes]]:
    """The file to write; removed again if it does not get to its end."""
    if out is None:
        try:
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            # Whoever reads has enough. What is still buffered must not be tried again on exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    try:
        with out.open("xb") as file:
            try:
                yield file
            except BaseException:
                out.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise ConfigError(f"--out: {out}: {error.strerror or error}") from None


def _compact(arguments: argparse.Namespace) -> int:
    data_dir, url = _where(arguments)
    if url is not None:
        found = ask(url, "POST", "/v1/tape/compact", timeout_s=TIMEOUT_S)
    else:
        with _held(data_dir) as recorder:
            made, dropped = recorder.compact()
        found = {"made": _names(made), "dropped": _names(dropped)}
    for name in found["made"]:
        print(f"made {name}")
    for name in found["dropped"]:
        print(f"dropped {name}")
    print(f"{len(found['made'])} segments made, {len(found['dropped'])} dropped")
    return 0


def _recover(arguments: argparse.Namespace) -> int:
    data_dir, url = _where(arguments)
    if url is not None:
        found = ask(url, "POST", "/v1/tape/recover", timeout_s=TIMEOUT_S)
    else:
        with _held(data_dir) as recorder:
            damaged = recorder.recover()
            found = {
                "damaged": _names(damaged),
                "quarantined": [path.name for path in recorder.quarantined],
                "adopted": _names(recorder.adopted),
            }
    for name in (*found["damaged"], *found["quarantined"]):
        print(f"set aside in quarantine: {name}")
    for name in found["adopted"]:
        print(f"taken in again: {name}")
    num_damaged = len(found["damaged"]) + len(found["quarantined"])
    print(f"{num_damaged} damaged, {len(found['adopted'])} taken in again")
    return 0


def _stats(arguments: argparse.Namespace) -> int:
    data_dir, url = _where(arguments)
    if url is not None:
        found = ask(url, "GET", "/v1/tape/stats", timeout_s=TIMEOUT_S)
    else:
        from logs.export import stats

        with contextlib.closing(tape_reader(data_dir)) as reader:
            found = stats(reader)
    print(json.dumps(found, indent=2))
    return 0


def _where(arguments: argparse.Namespace) -> tuple[Path, str | None]:
    data_dir = data_dir_of(arguments.data_dir)
    return data_dir, arguments.url or running_gateway(data_dir)


@contextlib.contextmanager
def _held(data_dir: Path) -> Iterator[Recorder]:
    """The tape, opened for writing as a gateway would; ConfigError where there is none or it is held."""
    from logs.recorder import Recorder
    from logs.schema import TapeTooNew
    from logs.segments import FOLDER
    from logs.tape import FILE, TapeBusy, TapeUnwritable
    from logs.upkeep import Keep

    if not (data_dir / FILE).exists() and not (data_dir / FOLDER).is_dir():
        raise ConfigError(f"--data-dir: there is no tape in {data_dir}")
    # What the tape says of itself stays out of what the command prints.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    logs = load_config(None, os.environ).logs
    keep = Keep.of(logs.segment_mb, logs.retention_days, logs.retention_gb)
    try:
        recorder = Recorder(data_dir, keep=keep)
    except (TapeBusy, TapeUnwritable, TapeTooNew) as error:
        raise ConfigError(f"--data-dir: {error}") from None
    with contextlib.closing(recorder):
        yield recorder


def _names(segments: Any) -> list[str]:
    return [f"{segment.dt}/{segment.name}" for segment in segments]

"""The redaction hook sees every row first, and fails closed."""

import pytest
from tape_fakes import Script, record

from gateway.policy import Policy
from gateway.recorded import COLUMNS
from gateway.replay import replay_all
from logs.recorder import Recorder
from logs.redact import BadHook, load


def hide(table, row):
    """As a team would write it: no text, no token bytes, and an id that cannot be changed."""
    if table == "steps":
        return row | {"token_bytes": None}
    return row | {"params": "{}", "prompt_preview": None, "answer_text": "***", "request_id": "x"}


def leaves_out(table, row):
    return {"idx": row["idx"]} if table == "steps" else row


def adds(table, row):
    return row | {"mood": "good"}


def fails(table, row):
    raise KeyError("oops")


def nothing(table, row):
    return None


def recorded(tmp_path, hook):
    recorder = Recorder(tmp_path, redact=load(f"{__name__}.{hook}"))
    record(recorder, Script(Policy(protect_first=2)).run())
    reader = recorder.reader()
    answer = (
        reader.trace("r"),
        reader.steps("r"),
        dict(recorder.dropped),
        list(replay_all(reader.every_choice(COLUMNS))),
    )
    recorder.close()
    return answer


def test_what_the_hook_hides_is_not_written(tmp_path):
    summary, steps, dropped, results = recorded(tmp_path, "hide")

    assert (summary["params"], summary["prompt_preview"], summary["answer_text"]) == ({}, None, "***")
    assert steps["token_bytes"].null_count == len(steps)
    assert (dropped, results[0].mismatches) == ({}, [])


def test_columns_it_leaves_out_are_null(tmp_path):
    _, steps, _, _ = recorded(tmp_path, "leaves_out")

    assert steps["token_id"].null_count == len(steps)
    assert steps["seq"].to_pylist() == list(range(len(steps)))


@pytest.mark.parametrize("hook", ["adds", "fails", "nothing"])
def test_where_it_fails_nothing_is_written_and_that_is_counted(tmp_path, hook):
    summary, steps, dropped, _ = recorded(tmp_path, hook)

    assert (summary, len(steps), set(dropped)) == (None, 0, {"redaction"})


@pytest.mark.parametrize("path", ["", "load", "nowhere.at.all", "logs.redact.missing", "logs.redact.KEYS"])
def test_a_path_that_names_no_function_is_refused(path):
    with pytest.raises(BadHook, match=r"cannot be loaded|is not a function"):
        load(path)

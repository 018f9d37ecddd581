"""Prompts from Python's own library: what is taken, in an order that anyone gets again."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest

from gateway.tuning.prompts import read_prompts
from gateway.tuning.stdlib_prompts import lines

STDLIB = Path(sysconfig.get_paths()["stdlib"])
DOC = "Say how many of the given things are there."
MODULE = f'''
def count(things, start=0):
    """{DOC}"""
    return start + len(things)

def _private(x):
    """{DOC}"""

def short(x):
    """Too short."""

def silent(x): ...

class Box:
    def method(self):
        """{DOC}"""
'''


def test_public_functions_with_a_docstring_and_nothing_of_their_code(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.py").write_text(MODULE)
    # The same function in another module is the same prompt; tests are no library.
    (tmp_path / "z.py").write_text(MODULE.replace("import", ""))
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "c.py").write_text(MODULE.replace("count", "tally"))
    (line,) = lines(tmp_path, 1)
    found = json.loads(line)
    assert found["id"].endswith(".count")
    assert found["kind"] == "code"
    assert found["prompt"].endswith(f'def count(things, start=0):\n    """{DOC}"""')
    with pytest.raises(ValueError, match="there are 1 functions"):
        lines(tmp_path, 2)


def test_a_shorter_list_is_the_beginning_of_a_longer_one() -> None:
    found = lines(STDLIB / "asyncio", 12)
    assert found[:5] == lines(STDLIB / "asyncio", 5)


@pytest.mark.e2e
def test_there_are_enough_for_a_calibration(tmp_path: Path) -> None:
    found = lines(STDLIB, 450)
    (tmp_path / "p.jsonl").write_text("\n".join(found))
    assert len(read_prompts(tmp_path / "p.jsonl")) == 450

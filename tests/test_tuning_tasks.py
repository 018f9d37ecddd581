"""Tasks: scores by hand, code in its sandbox, data that ships."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from gateway.config import ConfigError
from gateway.tuning.tasks import humaneval
from gateway.tuning.tasks.sandbox import passes
from gateway.tuning.tasks.task import load_task
from gateway.tuning.tasks.text import exact_match, f1, normalized, rouge_l


def test_squad_scores_by_hand() -> None:
    assert normalized("The  Eiffel-Tower, in a park!") == "eiffeltower in park"
    assert exact_match("The cat.", ["dog", "cat"]) == 1.0
    assert exact_match("two cats", ["cat"]) == 0.0
    # Two of three words right, two of four found: 2 * (2/3) * (1/2) / (7/6).
    assert f1("red big car", ["big red bus stop"]) == pytest.approx(4 / 7)
    assert f1("", ["x"]) == 0.0


def test_rouge_l_by_hand() -> None:
    """Longest common subsequence `police the gunman` of 4 and 4 words (Lin 2004): F = 3/4."""
    assert rouge_l("police kill the gunman", ["police killed the gunman"]) == pytest.approx(1.0)
    assert rouge_l("police end the gunman", ["police killed the gunman"]) == pytest.approx(0.75)


@pytest.mark.parametrize(("name", "binary"), [("qa", True), ("summary", False)])
def test_shipped_sets(name: str, binary: bool) -> None:
    task = load_task(name, allow_code_execution=False)
    assert len(task.prompts) == 50
    assert task.binary is binary
    for prompt in task.prompts:
        assert task.score(prompt, prompt.reference[0])[task.main] == pytest.approx(1.0)
        assert task.score(prompt, "nothing of the kind qqq")[task.main] < 0.5
        if name == "qa":
            text = normalized(prompt.messages[0]["content"])
            assert any(normalized(one) in text for one in prompt.reference)


def test_humaneval_runs_its_own_solutions() -> None:
    task = load_task("humaneval", allow_code_execution=True)
    assert len(task.prompts) == 164
    for prompt in (task.prompts[0], task.prompts[38], task.prompts[-1]):
        solution = prompt.extra["prompt"] + prompt.extra["canonical_solution"]
        assert task.score(prompt, f"Here it is:\n```python\n{solution}\n```\nDone.") == {"pass@1": 1.0}
        assert task.score(prompt, f"```python\n{prompt.extra['prompt']}    return None\n```") == {
            "pass@1": 0.0
        }
    # A body alone continues the problem's signature.
    body = task.prompts[0].extra["canonical_solution"]
    assert humaneval.score(task.prompts[0], body) == {"pass@1": 1.0}


@pytest.mark.parametrize(
    "program",
    [
        "assert 1 == 2",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "import socket; socket.socket()",
        "import subprocess; subprocess.run(['ls'])",
        "import os; os.fork()",
        "import os; os.system('true')",
        "open('x', 'w')",
        "import os; os.open('x', os.O_CREAT | os.O_WRONLY)",
        "bytearray(3 * 2**30)",
        "print('a' * 64); import os; os.write(1, b'a' * 32)",
        "def f(): f()\nf()",
        "syntax error",
    ],
)
def test_what_a_program_may_not_do(program: str) -> None:
    passed = passes(program, cpu_s=2)
    assert passed is program.startswith("print")


def test_a_program_has_no_environment_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    assert passes("import os; assert 'SECRET' not in os.environ; assert os.listdir('.') == []", cpu_s=2)
    assert not passes("while True: pass", cpu_s=1)


def test_a_listening_port_is_out_of_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert not passes(f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)", cpu_s=2)


def test_code_runs_only_where_it_is_allowed() -> None:
    with pytest.raises(ConfigError, match="--allow-code-execution"):
        load_task("humaneval", allow_code_execution=False)


def test_files_as_tasks(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    task = load_task(str(file), allow_code_execution=False)
    assert (task.main, task.score(task.prompts[0], "x")) == (None, {})
    file.write_text('{"prompt": "a", "reference": ["x", "y"]}\n')
    task = load_task(str(file), allow_code_execution=False)
    assert task.score(task.prompts[0], "Y!\nmore") == {"exact match": 1.0, "F1": 1.0}
    file.write_text('{"prompt": "a", "reference": "x"}\n{"prompt": "b"}\n')
    with pytest.raises(ConfigError, match="prompt 2: reference"):
        load_task(str(file), allow_code_execution=False)
    with pytest.raises(ConfigError, match="neither a task"):
        load_task("gsm8k", allow_code_execution=False)

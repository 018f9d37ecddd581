"""What a task is, and the tasks by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from gateway.config import ConfigError
from gateway.tuning.prompts import Prompt, read_prompts
from gateway.tuning.tasks import humaneval, text

NAMES = ("humaneval", "qa", "summary")


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts and their scoring. main: the metric that is compared; binary: whether it is 0 or 1.

    score: every metric of an answer's text, each in [0, 1]; no metrics for a task that is agreement alone.
    """

    name: str
    prompts: Sequence[Prompt]
    main: str | None
    binary: bool
    score: Callable[[Prompt, str], Mapping[str, float]]


def load_task(name: str, *, allow_code_execution: bool) -> Task:
    """A task by name, or a file: with `reference` it scores exact match and F1, without agreement alone.

    Raises ConfigError.
    """
    if name == "humaneval":
        if not allow_code_execution:
            raise ConfigError(
                "--task humaneval runs code that the models wrote, in a limited subprocess: allow it with "
                "--allow-code-execution"
            )
        return Task(name, humaneval.prompts(), "pass@1", True, humaneval.score)
    if name == "qa":
        return Task(name, _shipped("qa.jsonl"), "exact match", True, text.qa)
    if name == "summary":
        text.rouge_l("a", ("a",))
        return Task(name, _shipped("summary.jsonl"), "ROUGE-L", False, text.summary)
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"--task: {name!r} is neither a task ({', '.join(NAMES)}) nor a file")
    found = read_prompts(path)
    if any(prompt.reference for prompt in found):
        if lacking := [prompt.id for prompt in found if not prompt.reference]:
            raise ConfigError(f"{path}: prompt {lacking[0]}: reference: missing, others have one")
        return Task(path.name, found, "exact match", True, text.qa)
    return Task(path.name, found, None, False, lambda prompt, answer: {})


def _shipped(file: str) -> list[Prompt]:
    with resources.as_file(resources.files("gateway.tuning.tasks").joinpath(file)) as path:
        return read_prompts(path)

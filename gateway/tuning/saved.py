"""Finished prompts beside the output, a JSON line each, so that a run that was stopped goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gateway.config import ConfigError
from gateway.policy import Policy
from gateway.progress import progress, say
from gateway.tuning.prompts import Prompt
from gateway.tuning.run import Answer, Runner


class Saved:
    """Answers by policy hash and prompt; `about` says what they hang on (models, numerics, max_tokens).

    Raises ConfigError where the file holds answers of something else.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self._found: dict[tuple[str, str], Answer] = {}
        lines = list(_complete_lines(path))
        if lines and lines[0] != dict(about):
            raise ConfigError(f"{path}: holds answers of other models or settings; delete it to start afresh")
        for line in lines[1:]:
            self._found[line["policy"], line["answer"]["prompt"]] = Answer(**line["answer"])
        # Rewritten, so that a half line at its end does not spoil the next.
        half = path.with_suffix(".half")
        with half.open("w", encoding="utf-8") as file:
            for kept in lines or [dict(about)]:
                file.write(json.dumps(kept) + "\n")
        half.replace(path)

    def __len__(self) -> int:
        return len(self._found)

    def run(self, runner: Runner, prompts: Sequence[Prompt], policy: Policy, label: str) -> list[Answer]:
        """The answers to prompts in their order: those that are missing are run, and kept."""
        missing = [p for p in prompts if (policy.hash, p.digest) not in self._found]
        if missing and len(missing) < len(prompts):
            say(f"{label}: {len(prompts) - len(missing)} of {len(prompts)} prompts are done already")
        if missing:
            with self.path.open("a", encoding="utf-8") as file, progress(label, len(missing), "") as advance:
                for answer in runner.run(missing, policy):
                    self._found[policy.hash, answer.prompt] = answer
                    file.write(json.dumps({"policy": policy.hash, "answer": asdict(answer)}) + "\n")
                    file.flush()
                    advance(1)
        return [self._found[policy.hash, p.digest] for p in prompts]


def _complete_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON lines of a file up to the first that is broken off; none where there is no file."""
    if not path.exists():
        return
    for text in path.read_text(encoding="utf-8").split("\n")[:-1]:
        try:
            yield json.loads(text)
        except ValueError:
            return

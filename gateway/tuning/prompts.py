"""Prompts from a file: JSON lines or plain text, checked line by line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.config import ConfigError
from gateway.core import Kind
from gateway.kinds import kind_of
from gateway.text import ChatTemplateError, Tokenizer

KNOWN_KEYS = frozenset({"id", "kind", "prompt", "messages", "reference"})


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: a user's words or a chat. kind: of what sort it is, for results by kind.

    reference: the right answer, or any of several; extra: what a task needs beside it.
    """

    id: str
    kind: str
    messages: tuple[Mapping[str, Any], ...]
    reference: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """16 hex digits naming what the models are asked."""
        return hashlib.sha256(json.dumps(self.messages, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def detected(self) -> Kind:
        """The kind that a gateway would tell from the last user message."""
        said = (str(m["content"]) for m in reversed(self.messages) if m["role"] == "user")
        return kind_of(next(said, ""))

    def ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Token ids: by the chat template where there is one, else the messages' texts in lines."""
        messages = [dict(message) for message in self.messages]
        try:
            if tokenizer.has_chat_template:
                return tuple(tokenizer.chat(messages))
            return tuple(tokenizer.encode("\n".join(str(message["content"]) for message in messages)))
        except (ChatTemplateError, ValueError) as error:
            raise ConfigError(f"prompt {self.id}: {error}") from None


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file, duplicates left out; raises ConfigError naming the line.

    JSON lines: objects with `prompt` or `messages`, and perhaps `id`, `kind`, `reference`. Any other file:
    one prompt a line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    read = _json_lines if path.suffix in (".jsonl", ".json", ".ndjson") else _text_lines
    unique: dict[str, Prompt] = {}
    for prompt in read(path, text):
        unique.setdefault(prompt.digest, prompt)
    if not unique:
        raise ConfigError(f"{path}: there are no prompts in it")
    return list(unique.values())


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _text_lines(path: Path, text: str) -> Iterator[Prompt]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield Prompt(str(number), "", ({"role": "user", "content": line.strip()},))


def _json_lines(path: Path, text: str) -> Iterator[Prompt]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where}: not valid JSON: {error}") from None
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: expected an object")
        if unknown := sorted(set(value) - KNOWN_KEYS):
            known = ", ".join(sorted(KNOWN_KEYS))
            raise ConfigError(f"{where}: {unknown[0]}: unknown key (there are: {known})")
        yield Prompt(
            id=str(value.get("id", number)),
            kind=str(value.get("kind", "")),
            messages=_messages(where, value),
            reference=_reference(where, value.get("reference")),
        )


def _messages(where: str, value: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    if ("prompt" in value) == ("messages" in value):
        raise ConfigError(f"{where}: prompt: name either `prompt` or `messages`")
    if "prompt" in value:
        if not isinstance(value["prompt"], str) or not value["prompt"]:
            raise ConfigError(f"{where}: prompt: expected text")
        return ({"role": "user", "content": value["prompt"]},)
    messages = value["messages"]
    well_formed = isinstance(messages, list) and bool(messages)
    for message in messages if well_formed else ():
        well_formed &= isinstance(message, dict) and isinstance(message.get("role"), str)
        well_formed &= isinstance(message, dict) and isinstance(message.get("content"), str)
    if not well_formed:
        raise ConfigError(f"{where}: messages: expected a list of objects with `role` and `content`")
    return tuple(messages)


def _reference(where: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    several = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str) for one in several):
        raise ConfigError(f"{where}: reference: expected text or a list of texts")
    return tuple(several)

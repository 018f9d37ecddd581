"""Constrained output: which tokens a JSON schema or a tool call allows next, by llguidance.

llguidance was chosen for token masks in microseconds, rollback of any length, no dependencies, and errors
instead of silence for schema keywords that it does not implement.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import structlog
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from gateway.text import Tokenizer

log = structlog.get_logger(__name__)

TOOL_OPEN, TOOL_CLOSE = "<tool_call>", "</tool_call>"
"""The Hermes form of a tool call, which Qwen's templates ask for too."""

JSON_OPTIONS: Any = {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,32}"}
"""Whitespace between JSON tokens is free but bounded: a model could otherwise write blanks for ever."""


class GrammarError(ValueError):
    """A schema that cannot be held to; the message says why."""


class Grammars:
    """Compiles grammars for one tokenizer. vocab_size: how many ids a mask covers, the model's head."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._eos = sorted(tokenizer.eos_ids)
        self._tokenizer = LLTokenizer(tokenizer.to_json(), n_vocab=tokenizer.vocab_size, eos_token=self._eos)

    def json_schema(self, schema: Mapping[str, Any]) -> Callable[[], Matcher]:
        """Output that is one JSON value of this schema; takes up to a second for a large one."""
        return self._compile(LLMatcher.grammar_from_json_schema(dict(schema), overrides=JSON_OPTIONS))

    def json_object(self) -> Callable[[], Matcher]:
        """Output that is one JSON object."""
        return self.json_schema({"type": "object"})

    def tool_calls(self, tools: Mapping[str, Mapping[str, Any]], parallel: bool) -> Callable[[], Matcher]:
        """One call, or several where parallel, of the tools (name -> schema of the arguments)."""
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": dict(schema)},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for name, schema in tools.items()
        ]
        body = json.dumps({"x-guidance": JSON_OPTIONS, "anyOf": calls})
        more = '("\\n" call)*' if parallel else ""
        return self._compile(
            LLMatcher.grammar_from_lark(
                f'start: call {more}\ncall: "{TOOL_OPEN}\\n" body "\\n{TOOL_CLOSE}"\nbody: %json {body}\n'
            )
        )

    def _compile(self, grammar: str) -> Callable[[], Matcher]:
        pattern = LLMatcher(self._tokenizer, grammar, log_level=0)
        if pattern.is_error():
            raise GrammarError(pattern.get_error().strip().splitlines()[0])
        return lambda: Matcher(pattern.deep_copy(), self.vocab_size, self._eos)


class Matcher:
    """A grammar's place in one row's output; gateway.sampling.Constraint."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos: Sequence[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos = list(eos)
        self._num_ignored = 0

    def mask(self) -> Tensor:
        """Which tokens may come now: bool [vocab_size]; the end alone once the grammar is complete."""
        allowed = torch.zeros(self._vocab_size, dtype=torch.bool)
        if self._num_ignored or self._matcher.is_stopped():
            allowed[self._eos] = True
            return allowed
        bits = np.unpackbits(
            np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little"
        )
        count = min(len(bits), self._vocab_size)
        allowed[:count] = torch.from_numpy(bits[:count].astype(np.bool_))
        if not bool(allowed.any()):
            # llguidance gave up (a limit); an answer that ends beats one that cannot go on.
            log.warning("grammar_gave_up", error=self._matcher.get_error())
            allowed[self._eos] = True
        return allowed

    def advance(self, token: int) -> None:
        """A token was drafted or written; one outside the grammar (given to a fork) ends the answer next."""
        if self._num_ignored or self._matcher.is_stopped() or self._matcher.validate_tokens([token]) == 0:
            self._num_ignored += 1
        else:
            self._matcher.consume_token(token)

    def rollback(self, num: int) -> None:
        """The last num tokens were dropped."""
        ignored = min(num, self._num_ignored)
        self._num_ignored -= ignored
        if num > ignored:
            self._matcher.rollback(num - ignored)

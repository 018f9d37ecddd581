"""/v1/completions with token ids: vLLM's documented way, and what llama-server, trtllm-serve or another
tokentape understand.

Greedy: one call whose `prompt` is the list [prefix], [prefix + d1], [prefix + d1 d2], ..., one token each;
the engine's prefix cache makes the repetition cheap. Sampling: one call a position, each with its own seed,
since a list would share one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.engines.query import Call, Malformed, Query
from gateway.engines.top import Candidate, reading
from gateway.sampling import Reading

PATH = "/v1/completions"

TOKEN_ID = "token_id:"
"""vLLM's name for a token, where text would not tell which it is."""


@dataclass(frozen=True, slots=True)
class Completions:
    """listed: whether several prompts may go in one call. extra: fields of the body that this server needs.
    names: token text -> id, where the server can only name tokens by their text."""

    model: str
    vocab_size: int
    listed: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, int] = field(default_factory=dict)

    def calls(self, query: Query) -> list[Call]:
        """One call, or one a position."""
        contexts = [query.context(i) for i in range(query.num_positions)]
        sampling = query.sampling
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": 1,
            "logprobs": query.num_topk,
            "temperature": sampling.temperature,
            # Said outright: some servers would take the model's own generation defaults.
            "top_p": sampling.top_p,
            **self.extra,
        }
        if sampling.temperature == 0:
            if self.listed:
                return [Call(PATH, {**body, "prompt": contexts})]
            return [Call(PATH, {**body, "prompt": context}) for context in contexts]
        body |= {"top_k": sampling.top_k} if sampling.top_k else {}
        body |= {"min_p": sampling.min_p} if sampling.min_p else {}
        return [Call(PATH, {**body, "prompt": c, "seed": query.seed(i)}) for i, c in enumerate(contexts)]

    def readings(self, query: Query, answers: list[Any]) -> list[Reading]:
        """One Reading a choice."""
        try:
            choices = [c for answer in answers for c in sorted(answer["choices"], key=lambda c: c["index"])]
            told = [self._token(choice) for choice in choices]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise Malformed(f"{PATH}: {type(error).__name__}: {error}") from None
        if len(told) != query.num_positions:
            raise Malformed(f"{PATH}: {len(told)} choices for {query.num_positions} prompts")
        return [
            reading(token, top, query.sampling, query.num_topk, self.vocab_size, query.drafted(i))
            for i, (token, top) in enumerate(told)
        ]

    def _token(self, choice: Mapping[str, Any]) -> tuple[int, list[Candidate]]:
        """A choice's one token and the candidates beside it."""
        told = choice["logprobs"]
        if told is None:
            raise Malformed(f"{PATH}: no logprobs")
        if "content" in told:
            # llama-server's form, which is chat's with the ids.
            entry = told["content"][0]
            top = [(int(other["id"]), other["logprob"]) for other in entry["top_logprobs"]]
            return int(entry["id"]), [*top, (int(entry["id"]), entry["logprob"])]
        ids = choice.get("token_ids")
        token = int(ids[0]) if ids else self._id(told["tokens"][0])
        if token is None:
            raise Malformed(f"{PATH}: its token {told['tokens'][0]!r} could be several")
        named = [(self._id(name), logprob) for name, logprob in told["top_logprobs"][0].items()]
        top = [(other, logprob) for other, logprob in named if other is not None]
        return token, [*top, (token, told["token_logprobs"][0])]

    def _id(self, name: str) -> int | None:
        """A token's id; None where only a text is given that several tokens share."""
        if name.startswith(TOKEN_ID):
            return int(name.removeprefix(TOKEN_ID))
        return self.names.get(name)

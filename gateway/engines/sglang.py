"""SGLang's native /generate: input logprobs from the last prefix token on; the radix cache serves the rest.

Its OpenAI `echo` would compute the whole prompt anew, and streaming sessions cannot roll back: neither is
used. At a temperature above 0 its output logprobs are those after the temperature; so the samples come from
one call, the logprobs of A from another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.engines.query import Call, Malformed, Query
from gateway.engines.top import Candidate, reading
from gateway.sampling import Reading

PATH = "/generate"


@dataclass(frozen=True, slots=True)
class Sglang:
    """SGLang names tokens by id everywhere, so that nothing of the vocabulary but its size is needed."""

    vocab_size: int

    def calls(self, query: Query) -> list[Call]:
        """The scoring call; above temperature 0 also one that samples at every position."""
        score = {
            "input_ids": query.context(len(query.draft)),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": len(query.prefix) - 1,
            "top_logprobs_num": query.num_topk,
        }
        if query.sampling.temperature == 0:
            return [Call(PATH, score)]
        s, positions = query.sampling, range(query.num_positions)
        drawn = {
            "max_new_tokens": 1,
            "ignore_eos": True,
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k or -1,
            "min_p": s.min_p,
        }
        sample = {
            "input_ids": [query.context(i) for i in positions],
            "sampling_params": [{**drawn, "sampling_seed": query.seed(i)} for i in positions],
        }
        return [Call(PATH, score), Call(PATH, sample)]

    def readings(self, query: Query, answers: list[Any]) -> list[Reading]:
        """Entry 0 of the input's logprobs is null (its logits were cached), 1.. are the draft's."""
        try:
            told = answers[0]["meta_info"]
            owns = [*told["input_token_logprobs"][1:], told["output_token_logprobs"][0]]
            tops = [*(told["input_top_logprobs"] or [None])[1:], told["output_top_logprobs"][0]]
            candidates = [[_candidate(c) for c in (*top, own)] for top, own in zip(tops, owns, strict=True)]
            if query.sampling.temperature > 0:
                tokens = [int(answer["output_ids"][0]) for answer in answers[1]]
            else:
                tokens = [max(top, key=lambda c: (c[1], -c[0]))[0] for top in candidates]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise Malformed(f"{PATH}: {type(error).__name__}: {error}") from None
        if not len(candidates) == len(tokens) == query.num_positions:
            found = f"{len(candidates)} scored, {len(tokens)} drawn"
            raise Malformed(f"{PATH}: {found}, for {query.num_positions} positions")
        return [
            reading(token, top, query.sampling, query.num_topk, self.vocab_size, query.drafted(i))
            for i, (token, top) in enumerate(zip(tokens, candidates, strict=True))
        ]


def _candidate(entry: list[Any]) -> Candidate:
    """SGLang's (logprob, token id, text or null)."""
    return int(entry[1]), float(entry[0])

"""vLLM's tokens-in, tokens-out endpoint: the whole draft in one pass, read off `prompt_logprobs`.

It is there only where the server was started with `--enable-scale-out` and says how much of a prompt it had
cached (`--enable-prompt-tokens-details`): rows of cached positions are never computed, and hold whatever the
memory held. Greedy only; a sample at every position needs the documented way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.engines.completions import Completions
from gateway.engines.query import Call, Malformed, Query
from gateway.engines.top import Candidate, reading
from gateway.sampling import Reading

PATH = "/inference/v1/generate"


class CachedRows(Malformed):
    """Part of the draft was in the prefix cache, so its rows are undefined; the documented way tells."""


@dataclass(frozen=True, slots=True)
class Generate:
    """documented: what answers where this endpoint cannot."""

    documented: Completions

    def calls(self, query: Query) -> list[Call]:
        """One call with prefix and draft as its prompt."""
        if query.sampling.temperature > 0 or not query.draft:
            return self.documented.calls(query)
        sampling = {
            "max_tokens": 1,
            "temperature": 0.0,
            "repetition_penalty": 1.0,
            "logprobs": query.num_topk,
            "prompt_logprobs": query.num_topk,
            # Asking for prompt_logprobs would otherwise compute the whole prompt anew.
            "skip_reading_prefix_cache": False,
            "detokenize": False,
            "ignore_eos": True,
        }
        prompt = query.context(len(query.draft))
        body = {"model": self.documented.model, "token_ids": prompt, "sampling_params": sampling}
        return [Call(PATH, body)]

    def readings(self, query: Query, answers: list[Any]) -> list[Reading]:
        """The prompt's last rows are the draft's; the generated token is the next."""
        if query.sampling.temperature > 0 or not query.draft:
            return self.documented.readings(query, answers)
        try:
            (answer,) = answers
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            # The row of a token comes from the position before it.
            if cached >= len(query.prefix):
                raise CachedRows(f"{cached} tokens cached, {len(query.prefix)} before the draft")
            rows = answer["prompt_logprobs"][-len(query.draft) :]
            tops = [[(int(i), entry["logprob"]) for i, entry in row.items()] for row in rows]
            tokens = [max(top, key=lambda c: (c[1], -c[0]))[0] for top in tops]
            last = answer["choices"][0]["logprobs"]["content"][0]
            tokens.append(int(last["token_id"]))
            tops.append(_candidates(last))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise Malformed(f"{PATH}: {type(error).__name__}: {error}") from None
        if len(tops) != query.num_positions:
            raise Malformed(f"{PATH}: {len(tops)} rows for {query.num_positions} positions")
        size = self.documented.vocab_size
        return [
            reading(token, top, query.sampling, query.num_topk, size, query.drafted(i))
            for i, (token, top) in enumerate(zip(tokens, tops, strict=True))
        ]


def _candidates(entry: dict[str, Any]) -> list[Candidate]:
    top = [(int(other["token_id"]), other["logprob"]) for other in entry["top_logprobs"]]
    return [*top, (int(entry["token_id"]), entry["logprob"])]

"""Meeting an engine: which model it serves, how it is best asked, whether a token id means the same there.

What it lacks is found here and named, rather than in the middle of an answer. What it says of a fixed text,
the canary, is kept: an engine that later says something else has been given another model.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import httpx
import structlog

from gateway.core import Sampling, TopK
from gateway.engines.client import ask
from gateway.engines.completions import Completions
from gateway.engines.query import Dialect, EngineFault, Query, Swapped
from gateway.engines.sglang import Sglang
from gateway.engines.vllm import Generate
from gateway.sampling import Reading

log = structlog.get_logger(__name__)

Kind = Literal["vllm", "sglang", "openai"]

CANARY = "The quick brown fox jumps over the lazy dog. One, two, three: 1 + 2 = 3; def f(x): return x"
CANARY_DRAFT = 8
"""Tokens at the canary's end that are scored as a draft."""
CANARY_S = 20.0
SAME_NATS = 0.25
"""Largest difference of two runs of the same weights (batch shapes move bfloat16 logits by hundredths)."""
SAMPLE = 256
"""Token ids, spread over the vocabulary, whose text is compared."""


class Vocabulary(Protocol):
    """The local tokenizer."""

    vocab_size: int
    special_ids: frozenset[int]
    fingerprint: str

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(slots=True)
class Meeting:
    """A client's probe. model: the name to ask for; "" takes the first that the server lists. hash: names the
    model as far as it can be told from outside: its name, its vocabulary, what it says of the canary."""

    kind: Kind
    vocabulary: Vocabulary
    top_logprobs: int
    model: str = ""
    hash: str = ""
    canary: tuple[TopK, ...] = ()

    async def connect(self, http: httpx.AsyncClient) -> Dialect:
        """The best dialect that answers; raises EngineFault naming what the server lacks."""
        card = await self._card(http)
        await self._compare_vocabulary(http)
        dialect, readings = await self._best(http, owner=card.get("owned_by", ""))
        await self._check_raw(http, dialect, readings)
        self.canary = tuple(r.topk for r in readings)
        self.hash = hashlib.sha256(
            json.dumps([self.model, self.vocabulary.fingerprint, _rounded(self.canary)]).encode()
        ).hexdigest()
        log.info("engine_connected", url=str(http.base_url), model=self.model, way=type(dialect).__name__)
        return dialect

    async def check(self, ask: Callable[[Query], Coroutine[Any, Any, list[Reading]]]) -> None:
        """Swapped when the canary is answered otherwise than at connect."""
        now = [r.topk for r in await ask(self._query(0.0))]
        if difference(self.canary, now) > SAME_NATS:
            raise Swapped(f"{self.model}: the canary's logprobs are not those at connect; another model?")

    # ---- what is there

    async def _card(self, http: httpx.AsyncClient) -> dict[str, Any]:
        """The served model's entry in /v1/models; sets its name."""
        try:
            answer = await http.get("/v1/models")
            cards = answer.json()["data"] if answer.status_code == 200 else []
        except (httpx.HTTPError, OSError) as error:
            raise EngineFault(f"no server: {type(error).__name__}: {error}") from None
        except (ValueError, KeyError, TypeError):
            cards = []
        if answer.status_code in (401, 403):
            raise EngineFault(f"/v1/models: {answer.status_code}: the API key is missing or wrong")
        named = {card["id"]: card for card in cards}
        if not self.model:
            if not named:
                raise EngineFault("/v1/models lists no model; name one")
            self.model = next(iter(named))
        elif named and self.model not in named:
            raise EngineFault(f"model {self.model!r} is not served; there are: {', '.join(sorted(named))}")
        return dict(named.get(self.model, {}))

    async def _best(self, http: httpx.AsyncClient, owner: str) -> tuple[Dialect, list[Reading]]:
        """The first candidate that answers the canary; a faster one must agree with the documented way."""
        if self.kind == "sglang":
            sglang = Sglang(self.vocabulary.vocab_size)
            return sglang, await self._say(http, sglang)
        plain = Completions(self.model, self.vocabulary.vocab_size)
        if self.kind == "openai":
            return await self._first(http, _candidates(plain, owner, self.vocabulary))
        plain = replace(plain, extra=VLLM)
        readings = await self._say(http, plain)
        fast = Generate(plain)
        try:
            apart = difference([r.topk for r in readings], [r.topk for r in await self._say(http, fast)])
        except EngineFault as fault:
            log.info("engine_way_unavailable", way="prompt_logprobs", why=str(fault))
            return plain, readings
        if apart > SAME_NATS:
            log.warning("engine_way_unavailable", way="prompt_logprobs", nats_apart=apart)
            return plain, readings
        return fast, readings

    async def _first(
        self, http: httpx.AsyncClient, candidates: Sequence[Completions]
    ) -> tuple[Dialect, list[Reading]]:
        faults = []
        for candidate in candidates:
            try:
                return candidate, await self._say(http, candidate)
            except EngineFault as fault:
                faults.append(str(fault))
        raise EngineFault("its completions cannot score token ids: " + "; ".join(dict.fromkeys(faults)))

    async def _check_raw(self, http: httpx.AsyncClient, dialect: Dialect, greedy: list[Reading]) -> None:
        """A must be at temperature 1, whatever the request's temperature."""
        warm = await ask(http, dialect, self._query(2.0), self._headers("warm"))
        apart = difference([r.topk for r in greedy], [r.topk for r in warm])
        if apart > SAME_NATS:
            raise EngineFault(
                f"logprobs change with the temperature (by {apart:.2f}): they must be those before sampling "
                "(vLLM: --logprobs-mode raw_logprobs)"
            )

    # ---- what a token id means

    async def _compare_vocabulary(self, http: httpx.AsyncClient) -> None:
        """EngineFault where text and ids differ; a log line where the server has no tokenizer to ask."""
        ids = _spread(self.vocabulary)
        text = await self._tokenizer(http, "/detokenize", {"tokens": ids}, ("prompt", "content", "text"))
        body = {"prompt": CANARY, "content": CANARY}
        tokens = await self._tokenizer(http, "/tokenize", body, ("tokens",))
        if text is None or tokens is None:
            log.warning("engine_vocabulary_unchecked", url=str(http.base_url), lacks="/tokenize, /detokenize")
        expected = self.vocabulary.decode(ids, skip_special_tokens=False)
        bare = self.vocabulary.encode(CANARY, add_special_tokens=False)
        if text is not None and text.strip() != expected.strip():
            raise EngineFault("another vocabulary: token ids have other texts there")
        if tokens is not None and tokens[-len(bare) :] != bare:
            raise EngineFault("another vocabulary: the same text has other token ids there")

    async def _tokenizer(
        self, http: httpx.AsyncClient, path: str, body: dict[str, Any], keys: Sequence[str]
    ) -> Any:
        """What a tokenizer endpoint answers under one of `keys`; None where there is no such endpoint."""
        for form in (body, {"model": self.model, **{k: v for k, v in body.items() if k != "content"}}):
            try:
                answer = await http.post(path, json=form)
                told = answer.json() if answer.status_code == 200 else {}
            except (httpx.HTTPError, ValueError):
                continue
            for key in keys:
                if key in told:
                    return told[key]
        return None

    # ---- the canary

    def _query(self, temperature: float) -> Query:
        ids = self.vocabulary.encode(CANARY)
        return Query(
            prefix=tuple(ids[:-CANARY_DRAFT]),
            draft=tuple(ids[-CANARY_DRAFT:]),
            sampling=Sampling(max_tokens=1, seed=1, temperature=temperature),
            choice=0,
            position=0,
            num_topk=self.top_logprobs,
            deadline=time.monotonic() + CANARY_S,
            request_id="canary",
            affinity="canary",
        )

    async def _say(self, http: httpx.AsyncClient, dialect: Dialect) -> list[Reading]:
        return await ask(http, dialect, self._query(0.0), self._headers(type(dialect).__name__))

    def _headers(self, what: str) -> dict[str, str]:
        return {"x-request-id": f"canary.{what}.{time.time_ns()}"}


VLLM = {
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "ignore_eos": True,
    "return_tokens_as_token_ids": True,
    "return_token_ids": True,
}
"""Said outright, since vLLM would otherwise sample by the model's generation_config."""

LLAMA_SERVER = {"top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0, "ignore_eos": True, "cache_prompt": True}
TOKENTAPE = {
    "ignore_eos": True,
    "return_tokens_as_token_ids": True,
    "return_token_ids": True,
    "routing": {"mode": "large_only"},
}


def _candidates(plain: Completions, owner: str, vocabulary: Vocabulary) -> list[Completions]:
    """What to try on a server of unknown make: most telling first, a list of prompts before single ones."""
    if owner == "tokentape":
        return [replace(plain, extra=TOKENTAPE)]
    if owner == "llamacpp":
        return [replace(plain, extra=LLAMA_SERVER, listed=listed) for listed in (True, False)]
    named = replace(plain, names=_names(vocabulary))
    return [
        replace(candidate, listed=listed)
        for candidate in (replace(plain, extra=VLLM), named)
        for listed in (True, False)
    ]


def _names(vocabulary: Vocabulary) -> dict[str, int]:
    """Text -> id of every token that has a text of its own."""
    found: dict[str, int | None] = {}
    for token in range(vocabulary.vocab_size):
        try:
            text = vocabulary.token_bytes(token).decode()
        except UnicodeDecodeError:
            continue
        found[text] = None if text in found else token
    return {text: token for text, token in found.items() if token is not None}


def _spread(vocabulary: Vocabulary) -> list[int]:
    """Ids over the whole vocabulary, of tokens that are whole text."""
    step = max(1, vocabulary.vocab_size // SAMPLE)
    ids = []
    for token in range(0, vocabulary.vocab_size, step):
        if token in vocabulary.special_ids:
            continue
        try:
            vocabulary.token_bytes(token).decode()
        except UnicodeDecodeError:
            continue
        ids.append(token)
    return ids


def difference(before: Sequence[TopK], now: Sequence[TopK]) -> float:
    """Largest difference in nats of a likeliest token's logprob; infinite where it is not named at all."""
    if len(before) != len(now):
        return math.inf
    worst = 0.0
    for was, new in zip(before, now, strict=True):
        said = dict(zip(new.ids, new.logprobs, strict=True))
        top, logprob = was.ids[0], was.logprobs[0]
        worst = max(worst, abs(said[top] - logprob) if top in said else math.inf)
    return worst


def _rounded(canary: Sequence[TopK]) -> list[Any]:
    """The canary's likeliest tokens, coarse enough that another run of the same weights gives the same."""
    return [top.ids[0] for top in canary]

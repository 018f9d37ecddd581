"""Free drafts: what followed the last few tokens when they stood somewhere before (prompt-lookup decoding).

An index over a token sequence finds earlier places with the same n-gram; the place that matches longest is
copied from, if what follows it is also what followed most of the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

NGRAM = 3
"""Tokens that must match before anything is proposed."""

MOST_MATCH = 16
"""A longer match says nothing more."""

MOST_PLACES = 8
"""Earlier places of an n-gram that are remembered."""

LEAST_CONFIDENCE = 0.5
"""More than this share of the remembered places must agree on the next token."""


class NgramIndex:
    """Earlier places of every n-gram of one growing sequence."""

    def __init__(self, tokens: Sequence[int] = (), ngram: int = NGRAM) -> None:
        self.tokens: list[int] = []
        self.ngram = ngram
        # Lists, not deques: a deque of one place is 600 bytes, and most n-grams have one.
        self._places: dict[tuple[int, ...], list[int]] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens; each n-gram that now has a successor becomes findable."""
        for token in tokens:
            end = len(self.tokens)
            if end >= self.ngram:
                key = tuple(self.tokens[end - self.ngram :])
                places = self._places.get(key)
                if places is None:
                    self._places[key] = [end]
                else:
                    places.append(end)
                    del places[:-MOST_PLACES]
            self.tokens.append(token)

    def propose(self, context: Sequence[int], most: int, per_match: int = 2) -> list[int]:
        """Up to `most` tokens that may follow `context`: `per_match` for the n-gram, and as many for each
        token by which the match is longer."""
        if most < 1 or len(context) < self.ngram:
            return []
        places = self._places.get(tuple(context[len(context) - self.ngram :]))
        if not places:
            return []
        length, place = max((self._match(context, place), place) for place in places)
        following = self.tokens[place]
        agreeing = sum(self.tokens[other] == following for other in places)
        if agreeing <= LEAST_CONFIDENCE * len(places):
            return []
        return self.tokens[place : place + min(most, per_match * (length - self.ngram + 1))]

    def _match(self, context: Sequence[int], place: int) -> int:
        """How many tokens before `place` equal the end of the context."""
        longest = min(MOST_MATCH, len(context), place)
        length = self.ngram
        while length < longest and context[-1 - length] == self.tokens[place - 1 - length]:
            length += 1
        return length


class AnswerStore:
    """Earlier answers to copy from, one index for each scope (API key), since timing tells what was found.

    most_tokens: bound over all scopes; the scope that was used longest ago is forgotten first.
    """

    def __init__(self, most_tokens: int, corpus: Sequence[int] = ()) -> None:
        self.most_tokens = most_tokens
        self.corpus = NgramIndex(corpus, ngram=NGRAM + 1)
        self._scopes: OrderedDict[str, NgramIndex] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """Tokens remembered, the corpus not counted."""
        return sum(len(index.tokens) for index in self._scopes.values())

    def add(self, scope: str, answer: Sequence[int]) -> None:
        """Remember an answer; an index that grew past its share starts anew with this answer."""
        if len(answer) > self.most_tokens:
            return
        index = self._scopes.pop(scope, None)
        if index is None or 2 * len(index.tokens) > self.most_tokens:
            index = NgramIndex(ngram=NGRAM + 1)
        index.extend(answer)
        self._scopes[scope] = index
        while self.num_tokens > self.most_tokens:
            self._scopes.popitem(last=False)

    def propose(self, scope: str, context: Sequence[int], most: int, per_match: int = 2) -> list[int]:
        """Up to `most` tokens from this scope's answers, else from the corpus; per_match as in NgramIndex."""
        index = self._scopes.get(scope)
        found = index.propose(context, most, per_match) if index is not None else []
        return found or self.corpus.propose(context, most, per_match)

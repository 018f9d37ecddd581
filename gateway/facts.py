"""Does a proposed token look like part of a fact: a number, a quotation, a name?

A wrong fact reads as smoothly as a right one, so neither model's confidence shows it. Surface rules only,
in the output alone; they err towards "fact" (code strings count as quotations).
"""

from __future__ import annotations

import re

LOOK_BACK = 64
"""Output tokens before a proposal that are looked at."""

_WORD = re.compile(r"[^\W_][\w'\u2019-]*$")
_SENTENCE_END = tuple(".!?:\n;#*`>(")
"""A capital after one of these says nothing about a name."""


def looks_like_fact(before: str, token: str) -> bool:
    """Whether `token` behind the text `before` continues a number, a quoted span or a name."""
    if not token.strip():
        return False
    return any(c.isdigit() for c in token) or _quoted(before) or _named(before, token)


def _quoted(before: str) -> bool:
    """Whether a quotation is open on the current line; an apostrophe opens none."""
    line = before.rpartition("\n")[2]
    return line.count('"') % 2 == 1 or line.count("“") > line.count("”") or line.count("«") > line.count("»")


def _named(before: str, token: str) -> bool:
    """Whether the token begins or continues a capitalised word that does not begin a sentence."""
    text = before + token
    word = _WORD.search(text)
    if word is None or not word[0][0].isupper():
        return False
    lead = text[: word.start()].rstrip(" \t'\"“(")
    return bool(lead) and not lead.endswith(_SENTENCE_END)

"""What sort of answer a prompt asks for, told from its words alone: a pure function, in English.

A rule of thumb by which a policy may leave a kind of prompt to the large model alone; `tokentape evaluate`
shows what each kind costs and gains. What no word gives away is `other`.
"""

from __future__ import annotations

import re

from gateway.core import Kind

_CODE = re.compile(
    r"```|\bSQL\b|^\s*(?:def|class|import|function|public|#include)\b"
    r"|\b(?:write|complete|fix|refactor|implement|explain|review|debug)\b[^.?!\n]{0,60}"
    r"\b(?:functions?|class|program|script|code|query|regex|unit tests?|bug|python|javascript|bash)\b",
    re.IGNORECASE | re.MULTILINE,
)
_SHORT = re.compile(
    r"\b(?:yes or no|true or false|(?:one|single) word|few words|as few as possible|one sentence|just the|"
    r"only the (?:name|number|answer|letter|label|date)|multiple choice|classify|"
    r"(?:reply|answer|respond) (?:with|only|in) (?:only|just|an?|one|the|words))\b",
    re.IGNORECASE,
)
_REASONING = re.compile(
    r"\b(?:prove|proof|solve|calculate|compute|derive|deduce|step by step|probability|equation|theorem|"
    r"how (?:many|much|long|far|old|fast)|integral|remainder|puzzle|logic)\b|\d\s*[-+*/^=]\s*\d",
    re.IGNORECASE,
)


def kind_of(prompt: str) -> Kind:
    """The first kind whose words are in a prompt, of a chat in its last user message."""
    for kind, words in ((Kind.CODE, _CODE), (Kind.SHORT, _SHORT), (Kind.REASONING, _REASONING)):
        if words.search(prompt):
            return kind
    return Kind.OTHER

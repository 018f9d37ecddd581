"""Token bytes as inert, readable text: what cannot be seen becomes a symbol, what is long is cut.

Symbols stand between U+E000 and U+E001, so that the page can draw them muted and never take them for text.
"""

from __future__ import annotations

import codecs
import unicodedata
from collections.abc import Iterable

OPEN, CLOSE = "\ue000", "\ue001"
SHOWN = 160
"""Most characters of one token that the strip draws; the rest is counted."""

_CONTROLS = (
    "NUL", "SOH", "STX", "ETX", "EOT", "ENQ", "ACK", "BEL", "BS", "⇥", "LF", "VT", "FF", "CR", "SO", "SI",
    "DLE", "DC1", "DC2", "DC3", "DC4", "NAK", "SYN", "ETB", "CAN", "EM", "SUB", "ESC", "FS", "GS", "RS", "US",
)  # fmt: skip
_NAMES = {"\x7f": "DEL", "\u00a0": "NBSP", "\u3000": "□"}


def symbol(text: str) -> str:
    """text marked as a symbol."""
    return f"{OPEN}{text}{CLOSE}"


def _visible(char: str) -> str:
    if char == "\n":
        return symbol("↵") + "\n"
    if char in _NAMES:
        return symbol(_NAMES[char])
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:
        # A byte that is no part of any character (surrogateescape).
        return symbol(f"{code - 0xDC00:02X}")
    if code < 0x20:
        return symbol(_CONTROLS[code])
    if unicodedata.category(char) in {"Cc", "Cf", "Co", "Cs", "Cn", "Zl", "Zp"}:
        return symbol(f"U+{code:04X}")
    return char


def prose(text: str, limit: int = SHOWN) -> str:
    """text with symbols for controls, direction marks and unassigned code points, but spaces as they are."""
    shown = "".join(c if c == "\n" else _visible(c) for c in text[:limit])
    return shown + symbol(f"… +{len(text) - limit:,}") if len(text) > limit else shown


def visible(text: str, limit: int = SHOWN) -> str:
    """Like prose, with spaces at the edges and line breaks drawn too."""
    left = text[:limit]
    body = left.lstrip(" ")
    lead = len(left) - len(body)
    core = body.rstrip(" ")
    trail = len(body) - len(core)
    shown = symbol("·" * lead) if lead else ""
    shown += "".join(_visible(c) for c in core)
    shown += symbol("·" * trail) if trail else ""
    if len(text) > limit:
        shown += symbol(f"… +{len(text) - limit:,}")
    return shown


def plain(shown: str) -> str:
    """A marked text without its marks, for titles and tables."""
    return shown.replace(OPEN, "").replace(CLOSE, "")


def strip_texts(tokens: Iterable[bytes]) -> list[str]:
    """One marked text a token; a character split over tokens shows its bytes, and itself where it ends."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
    shown = []
    waiting = b""
    for token in tokens:
        text = decoder.decode(token)
        before, waiting = waiting, decoder.getstate()[0]
        head = _continuation(token) if before else b""
        tail = waiting[max(0, len(waiting) - len(token)) :]
        parts = [symbol(head.hex(" ").upper())] if head else []
        # What was begun before and never went on has been shown already, where it began.
        text = text[len(before) :] if before and "\udc80" <= text[:1] <= "\udcff" else text
        if text:
            parts.append(visible(text))
        if tail and tail != head:
            parts.append(symbol(tail.hex(" ").upper()))
        shown.append("".join(parts) or symbol("∅"))
    return shown


def _continuation(token: bytes) -> bytes:
    """The bytes at the start of token that go on with a character begun before it."""
    end = 0
    while end < len(token) and 0x80 <= token[end] < 0xC0:
        end += 1
    return token[:end]


def alone(token: bytes, limit: int = SHOWN) -> str:
    """One token's marked text without its neighbours; bytes that are no text are shown in hex."""
    try:
        text = token.decode("utf-8")
    except UnicodeDecodeError:
        return symbol(token[:16].hex(" ").upper() + (" …" if len(token) > 16 else ""))
    return visible(text, limit) if text else symbol("∅")

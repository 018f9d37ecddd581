"""Token bytes as text that can be seen and cannot act."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from replay_ui.pieces import CLOSE, OPEN, alone, plain, strip_texts, symbol, visible


def test_white_space_is_drawn() -> None:
    assert visible("  a b ") == symbol("··") + "a b" + symbol("·")
    assert visible("\n") == symbol("↵") + "\n"
    assert visible("\t") == symbol("⇥")


def test_controls_and_direction_marks_are_symbols() -> None:
    assert visible("\x1b[31m") == symbol("ESC") + "[31m"
    assert visible("\u202ea") == symbol("U+202E") + "a"
    assert visible("\x00") == symbol("NUL")


def test_a_character_split_over_tokens_shows_its_bytes_and_itself_where_it_ends() -> None:
    raw = "你".encode()
    assert strip_texts([raw[:2], raw[2:]]) == [symbol("E4 BD"), symbol("A0") + "你"]
    assert strip_texts([raw[:1], raw[1:2], raw[2:]]) == [symbol("E4"), symbol("BD"), symbol("A0") + "你"]


def test_a_byte_that_is_no_text_is_shown_in_hex() -> None:
    assert strip_texts([b"\xff"]) == [symbol("FF")]
    assert strip_texts([b"\xe4", b"a"]) == [symbol("E4"), "a"]


def test_a_long_token_is_cut_and_counted() -> None:
    drawn = plain(visible("x" * 100_000))
    assert len(drawn) < 200
    assert drawn.endswith("… +99,840")


def test_a_token_without_text_is_still_there() -> None:
    assert strip_texts([b""]) == [symbol("∅")]
    assert alone(b"") == symbol("∅")
    assert alone(b"\xe4\xbd") == symbol("E4 BD")


@given(st.lists(st.binary(max_size=6), max_size=20))
def test_nothing_invisible_survives_whatever_the_bytes(tokens: list[bytes]) -> None:
    shown = strip_texts(tokens)
    assert len(shown) == len(tokens)
    for text in shown:
        assert text
        for char in plain(text).replace("\n", ""):
            assert unicodedata.category(char) not in {"Cc", "Cf", "Co", "Cs", "Zl", "Zp"}


@given(st.text(max_size=60), st.integers(1, 7))
def test_the_text_is_all_there_however_it_is_cut(text: str, size: int) -> None:
    raw = text.encode("utf-8", "ignore")
    shown = "".join(strip_texts(raw[i : i + size] for i in range(0, len(raw), size)))
    visible_chars = [c for c in raw.decode("utf-8") if c.isalnum()]
    outside, inside = [], False
    for char in shown:
        if char in (OPEN, CLOSE):
            inside = char == OPEN
        elif not inside and char.isalnum():
            outside.append(char)
    assert outside == visible_chars

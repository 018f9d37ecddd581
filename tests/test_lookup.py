"""Free drafts: found where they stood before, never beyond what a plain search finds."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.lookup import MOST_MATCH, NGRAM, AnswerStore, NgramIndex

Tokens = st.lists(st.integers(0, 3), max_size=60)


def test_copies_what_followed_the_same_words() -> None:
    index = NgramIndex([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert index.propose([0, 1, 2, 3, 4, 5], 4) == [6, 7, 8, 9]


def test_a_bare_ngram_earns_the_least_and_a_longer_match_more() -> None:
    index = NgramIndex([9, 1, 2, 3, 4, 5, 6, 7, 8])
    assert index.propose([0, 1, 2, 3], 10) == [4, 5]
    assert index.propose([0, 9, 1, 2, 3], 10) == [4, 5, 6, 7]
    assert index.propose([0, 1, 2, 3], 10, per_match=1) == [4]
    assert index.propose([0, 9, 1, 2, 3], 10, per_match=1) == [4, 5]


def test_nothing_where_the_places_disagree() -> None:
    index = NgramIndex([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 6, 0])
    assert index.propose([7, 1, 2, 3], 5) == []
    assert NgramIndex([1, 2, 3, 4, 1, 2, 3, 5, 0]).propose([7, 1, 2, 3], 5) == []
    assert NgramIndex([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 5, 0]).propose([7, 1, 2, 3], 1) == [5]


def test_the_longest_match_wins_over_the_latest() -> None:
    index = NgramIndex([8, 1, 2, 3, 4, 9, 1, 2, 3, 4, 0])
    assert index.propose([8, 1, 2, 3], 1) == [4]
    index = NgramIndex([8, 7, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5])
    assert index.propose([8, 7, 1, 2, 3], 3) == [4, 0, 1]


def test_the_end_of_the_text_is_not_its_own_precedent() -> None:
    assert NgramIndex([1, 2, 3, 4]).propose([1, 2, 3, 4], 5) == []


@given(Tokens, Tokens, st.integers(1, 8))
def test_every_draft_followed_the_context_somewhere(text: list[int], context: list[int], most: int) -> None:
    drafts = NgramIndex(text).propose(context, most)
    assert len(drafts) <= most
    if drafts:
        end = context[-NGRAM:]
        places = [i for i in range(NGRAM, len(text)) if text[i - NGRAM : i] == end]
        assert any(text[i : i + len(drafts)] == drafts for i in places)


@given(Tokens, st.integers(1, 5))
def test_growing_token_by_token_is_building_at_once(text: list[int], most: int) -> None:
    grown = NgramIndex()
    for token in text:
        grown.extend([token])
    assert grown.propose(text, most) == NgramIndex(text).propose(text, most)


def test_match_length_is_bounded() -> None:
    text = [1] * 100
    assert len(NgramIndex(text).propose(text, 99)) <= 2 * (MOST_MATCH - NGRAM + 1)


def test_answers_are_kept_apart_by_scope() -> None:
    store = AnswerStore(100)
    store.add("a", [1, 2, 3, 4, 5, 6])
    assert store.propose("a", [1, 2, 3, 4], 2) == [5, 6]
    assert store.propose("b", [1, 2, 3, 4], 2) == []


def test_the_corpus_serves_every_scope() -> None:
    store = AnswerStore(0, corpus=[1, 2, 3, 4, 5, 6])
    store.add("a", [7, 7, 7, 7, 7])
    assert (store.propose("a", [1, 2, 3, 4], 2), store.num_tokens) == ([5, 6], 0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40)), max_size=30))
def test_memory_is_bounded(answers: list[tuple[str, int]]) -> None:
    store = AnswerStore(50)
    for scope, length in answers:
        store.add(scope, list(range(length)))
        assert store.num_tokens <= 50

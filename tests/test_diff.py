"""Two traces aligned."""

import pyarrow as pa
from tape_fakes import step

from gateway.core import Outcome, Tier, TopK
from gateway.diff import COLUMNS, diff
from logs.rows import Capture, step_table


def table(*rows, capture=Capture.FULL):
    return step_table(list(rows), [1] * len(rows), capture).select(COLUMNS)


def spelled(tokens, **fields):
    return [step("r", i, token_id=token, **fields) for i, token in enumerate(tokens)]


def test_equal_traces_do_not_diverge():
    found = diff(table(*spelled([1, 2, 3])), table(*spelled([1, 2, 3])))

    assert (found.first_divergence, found.num_same, found.max_logprob_difference) == (None, 3, 0.0)
    assert [s["same"] for s in found.steps] == [True] * 3
    assert [s["differs"] for s in found.steps] == [[]] * 3


def test_the_first_position_with_another_token():
    found = diff(table(*spelled([1, 2, 3, 4])), table(*spelled([1, 9, 3])))

    assert (found.first_divergence, found.num_same) == (1, 1)
    assert [s["same"] for s in found.steps] == [True, False, True, False]
    assert (found.steps[3]["a"]["token_id"], found.steps[3]["b"]) == (4, None)


def test_a_longer_answer_diverges_where_the_shorter_ends():
    assert diff(table(*spelled([1, 2])), table(*spelled([1, 2, 3]))).first_divergence == 2
    assert diff(table(), table()).first_divergence is None


def test_rows_that_were_not_written_do_not_shift_the_alignment():
    small = {"tier": Tier.SMALL, "outcome": Outcome.REJECTED}
    rows = [step("r", 0, token_id=1), step("r", 1, token_id=7, **small), step("r", 2, idx=1, token_id=2)]

    found = diff(table(*rows), table(*spelled([1, 2])))

    assert (found.first_divergence, len(found.steps)) == (None, 2)


def test_what_differs_though_the_token_is_the_same():
    found = diff(
        table(*spelled([1])), table(*spelled([1], tier=Tier.SMALL, outcome=Outcome.ACCEPTED, p_large=0.5))
    )

    assert found.steps[0]["differs"] == ["tier", "outcome", "p_large"]


def test_the_largest_logprob_difference_is_over_shared_tokens_before_the_divergence():
    a = [step("r", 0, token_id=1, large_topk=TopK((1, 2), (-0.5, -2.0))),
         step("r", 1, token_id=2, large_topk=TopK((1, 2), (-0.25, -0.5))),
         step("r", 2, token_id=3, large_topk=TopK((1, 2), (-0.25, -9.0)))]  # fmt: skip
    b = [step("r", 0, token_id=1, large_topk=TopK((1, 3), (-0.75, -1.0))),
         step("r", 1, token_id=8, large_topk=TopK((2, 1), (-1.5, -0.25))),
         step("r", 2, token_id=3, large_topk=TopK((1, 2), (-0.25, -1.0)))]  # fmt: skip

    found = diff(table(*a), table(*b))

    # At the divergence itself both still read the same prefix; behind it they do not.
    assert (found.max_logprob_difference, found.logprob_difference_at) == (1.0, 1)


def test_without_token_ids_nothing_is_the_same():
    found = diff(table(*spelled([1]), capture=Capture.SIGNALS), table(*spelled([1]), capture=Capture.SIGNALS))

    assert (found.first_divergence, found.max_logprob_difference) == (0, None)


def test_the_columns_are_the_tapes():
    assert set(COLUMNS) <= set(step_table([], [], Capture.FULL).column_names)
    assert isinstance(diff(table(), table(*spelled([1]))).steps, list)
    assert isinstance(table(), pa.Table)

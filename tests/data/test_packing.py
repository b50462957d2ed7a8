import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workhorse.data.dataset import TokenStream
from workhorse.data.packing import PackingPlan, pack


def packed(ends: np.ndarray, seq_len: int) -> PackingPlan:
    return pack(TokenStream("documents", [np.zeros(ends[-1], np.uint16)], ends), seq_len)


lengths_of_documents = st.lists(st.integers(1, 70), min_size=1, max_size=60)


@given(lengths=lengths_of_documents, seq_len=st.integers(1, 40))
def test_every_token_but_the_first_of_a_document_is_predicted_once(
    lengths: list[int], seq_len: int
) -> None:
    ends = np.cumsum(lengths)
    plan = packed(ends, seq_len)
    predicted = sorted(
        token
        for row in range(len(plan))
        for start, length in plan.row(row)
        for token in range(start + 1, start + length + 1)
    )
    firsts = {0, *ends.tolist()}
    assert predicted == [token for token in range(ends[-1]) if token not in firsts]


@given(lengths=lengths_of_documents, seq_len=st.integers(1, 40))
def test_rows_are_never_too_long_and_short_documents_never_cut(
    lengths: list[int], seq_len: int
) -> None:
    ends = np.cumsum(lengths)
    plan = packed(ends, seq_len)
    pieces = [piece for row in range(len(plan)) for piece in plan.row(row)]
    for row in range(len(plan)):
        assert 0 < sum(length for _, length in plan.row(row)) <= seq_len
    for begin, length in zip(ends - lengths, lengths, strict=True):
        if 1 < length <= seq_len + 1:
            assert (begin, length - 1) in pieces


@given(lengths=lengths_of_documents, seq_len=st.integers(1, 40))
def test_no_two_rows_could_be_one(lengths: list[int], seq_len: int) -> None:
    plan = packed(np.cumsum(lengths), seq_len)
    used = sorted(sum(length for _, length in plan.row(row)) for row in range(len(plan)))
    assert len(used) < 2 or used[0] + used[1] > seq_len


def test_a_document_goes_where_it_leaves_the_least_room() -> None:
    plan = packed(np.cumsum([8, 6, 4, 3]), seq_len=10)  # 7, 5, 3 and 2 predictions
    assert plan.row(0) == [(0, 7), (14, 3)]
    assert plan.row(1) == [(8, 5), (18, 2)]

import torch
from hypothesis import given
from hypothesis import strategies as st

from workhorse.evaluate.evaluation import batches, windows
from workhorse.nn import IGNORE

TEXT = list(range(100, 111))


def cut(tokens, context, stride):
    return [
        (list(window.inputs), list(window.targets)) for window in windows([tokens], context, stride)
    ]


def test_windows_that_do_not_overlap():
    assert cut(TEXT, 4, 4) == [
        ([100, 101, 102, 103], [101, 102, 103, 104]),
        ([104, 105, 106, 107], [105, 106, 107, 108]),
        ([108, 109], [109, 110]),
    ]


def test_overlapping_windows_predict_only_what_is_new():
    assert cut(TEXT, 4, 3) == [
        ([100, 101, 102, 103], [101, 102, 103, 104]),
        ([103, 104, 105, 106], [105, 106, 107]),
        ([106, 107, 108, 109], [108, 109, 110]),
    ]


def test_a_text_of_one_token_predicts_nothing():
    assert cut([7], 4, 4) == cut([], 4, 4) == []


@given(
    length=st.integers(0, 60),
    context=st.integers(1, 12),
    data=st.data(),
)
def test_every_token_but_the_first_is_predicted_once(length, context, data):
    stride = data.draw(st.integers(1, context))
    edges = sorted(data.draw(st.lists(st.integers(0, length), max_size=5)))
    tokens = list(range(length))
    chunks = [tokens[a:b] for a, b in zip([0, *edges], [*edges, length], strict=True)]
    seen = []
    for number, window in enumerate(windows(chunks, context, stride)):
        assert 1 <= len(window.inputs) <= context
        # Each target is the token after its input, and enough context precedes it.
        assert list(window.inputs[-len(window.targets) :]) == [t - 1 for t in window.targets]
        if number:
            assert len(window.inputs) - len(window.targets) >= context - stride
        seen += window.targets
    assert seen == tokens[1:]


def test_batches_pad_where_a_causal_model_does_not_look():
    pieces = [w for text in ([1, 2, 3, 4, 5], [6, 7], [8, 9, 10]) for w in windows([text], 3, 3)]
    (inputs, targets, lengths), (rest, rest_targets, _) = batches(pieces, batch_size=3)
    assert lengths == [3, 2, 1]
    assert inputs.tolist() == [[1, 2, 3], [8, 9, 0], [4, 0, 0]]
    assert targets.tolist() == [[2, 3, 4], [9, 10, IGNORE], [5, IGNORE, IGNORE]]
    assert (rest.tolist(), rest_targets.tolist()) == ([[6]], [[7]])
    assert inputs.dtype == targets.dtype == torch.int64

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workhorse.data import IGNORE, Batch, Batches, Split, ValidationBatches
from workhorse.errors import WorkhorseError

MakeSplit = Callable[..., Split]
PACKINGS = ["windows", "random_windows", "documents"]


def same(one: Batch, other: Batch) -> bool:
    pairs = [(getattr(one, name), getattr(other, name)) for name in vars(one)]
    return all((a is None and b is None) or torch.equal(a, b) for a, b in pairs)


def test_ignored_targets_are_those_of_the_loss() -> None:
    from workhorse.nn.logprobs import IGNORE as IGNORED_BY_LOSS

    assert IGNORE == IGNORED_BY_LOSS


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_batch_depends_on_its_step_alone(make_split: MakeSplit, packing: str) -> None:
    split = make_split([40, 7, 90], [300, 5], weights=[2, 1])
    settings = {"seq_len": 8, "batch_size": 6, "seed": 3, "packing": packing}
    forwards = [Batches(split, **settings)[step] for step in range(40)]
    batches = Batches(split, **settings)
    for step in reversed(range(40)):
        assert same(batches[step], forwards[step])


@pytest.mark.parametrize("packing", PACKINGS)
def test_micro_batches_and_ranks_see_parts_of_the_same_batch(
    make_split: MakeSplit, packing: str
) -> None:
    split = make_split([40, 7, 90], [300, 5], weights=[2, 1])
    batches = Batches(split, seq_len=8, batch_size=6, seed=3, packing=packing)
    for step in range(10):
        whole = batches[step]
        for start, stop in [(0, 1), (1, 4), (4, 6), (0, 6), (2, 2)]:
            assert same(batches.rows(step, start, stop), whole.rows(start, stop))


def test_the_stream_of_rows_does_not_depend_on_the_batch_size(make_split: MakeSplit) -> None:
    split = make_split([500])
    twelve = Batches(split, seq_len=8, batch_size=12, seed=1)
    four = Batches(split, seq_len=8, batch_size=4, seed=1)
    thrice = torch.cat([four[step].tokens for step in range(3)])
    assert torch.equal(twelve[0].tokens, thrice)


@pytest.mark.parametrize("packing", PACKINGS)
def test_random_stops_leave_the_stream_as_it_is(make_split: MakeSplit, packing: str) -> None:
    """Simulate 1,000 resumes over many epochs, with changing batch sizes and 1 to 4 processes."""
    chance = random.Random(packing)
    split = make_split([40, 7, 90] * 20, [300, 5] * 4, weights=[2, 1])
    settings = {"seq_len": 8, "seed": 3, "packing": packing}
    stream = Stream()
    step = rows = 0
    size = 6
    for _ in range(1000):
        if chance.random() < 0.3:
            size = chance.randint(4, 9)
        offset = rows - step * size
        batches = Batches(split, batch_size=size, offset=offset, **settings)
        processes = chance.randint(1, 4)
        for _ in range(chance.randint(1, 3)):
            for process in range(processes):
                begin, end = (number * size // processes for number in (process, process + 1))
                stream.add(batches.rows(step, begin, end))
            step, rows = step + 1, rows + size
    whole = Batches(split, batch_size=rows, **settings)
    assert max(rows / epoch for epoch in whole.rows_per_epoch.values()) > 20
    uninterrupted = Stream()
    uninterrupted.add(whole[0])
    assert stream.digests() == uninterrupted.digests()


class Stream:
    """SHA-256 over all added rows, one for each field of `Batch`."""

    def __init__(self) -> None:
        self.hashes = {field.name: hashlib.sha256() for field in fields(Batch)}

    def add(self, batch: Batch) -> None:
        for name, digest in self.hashes.items():
            tensor = getattr(batch, name)
            if tensor is not None:
                digest.update(tensor.contiguous().numpy())

    def digests(self) -> dict[str, str]:
        return {name: digest.hexdigest() for name, digest in self.hashes.items()}


@pytest.mark.parametrize("packing", PACKINGS)
def test_another_seed_is_another_order(make_split: MakeSplit, packing: str) -> None:
    split = make_split([50] * 20)
    one, other = (Batches(split, seq_len=8, batch_size=8, seed=s, packing=packing) for s in (1, 2))
    assert not torch.equal(one[0].tokens, other[0].tokens)


@given(length=st.integers(9, 200), seq_len=st.integers(1, 8), seed=st.integers(0, 5))
def test_an_epoch_of_windows_predicts_no_token_twice(
    make_split: MakeSplit, length: int, seq_len: int, seed: int
) -> None:
    batches = Batches(make_split([length]), seq_len=seq_len, batch_size=1, seed=seed)
    rows = batches.rows_per_epoch["source0"]
    for epoch in range(3):
        targets = torch.cat([batches[epoch * rows + row].targets for row in range(rows)])
        predicted = sorted(targets.flatten().tolist())
        assert predicted == list(range(predicted[0], predicted[0] + len(predicted)))
        assert len(predicted) > length - 2 * seq_len


def test_windows_start_elsewhere_in_every_epoch(make_split: MakeSplit) -> None:
    batches = Batches(make_split([200]), seq_len=16, batch_size=1, seed=0)
    rows = batches.rows_per_epoch["source0"]
    phases = {batches[epoch * rows].tokens[0, 0].item() % 16 for epoch in range(40)}
    assert len(phases) > 10


@pytest.mark.parametrize("packing", ["windows", "random_windows"])
def test_a_window_predicts_the_token_after_each(make_split: MakeSplit, packing: str) -> None:
    batches = Batches(make_split([100]), seq_len=16, batch_size=4, packing=packing)
    for step in range(20):
        batch = batches[step]
        assert batch.documents is None
        assert torch.equal(batch.targets, batch.tokens + 1)
        assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])


def test_the_shortest_corpus_is_one_window(make_split: MakeSplit) -> None:
    batches = Batches(make_split([9]), seq_len=8, batch_size=2)
    assert batches[5].tokens.tolist() == [list(range(8))] * 2


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30).filter(lambda ls: max(ls) > 1),
    seq_len=st.integers(1, 16),
)
def test_packed_targets_never_cross_a_document(
    make_split: MakeSplit, lengths: Sequence[int], seq_len: int
) -> None:
    split = make_split(lengths)
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    batches = Batches(split, seq_len=seq_len, batch_size=1, packing="documents")
    predicted = []
    for step in range(batches.rows_per_epoch["source0"]):
        batch = batches[step]
        used = batch.targets[0] != IGNORE
        documents = batch.documents[0][used]
        tokens, targets = batch.tokens[0][used], batch.targets[0][used]
        assert torch.equal(targets, tokens + 1)
        assert (document_of[tokens] == document_of[targets]).all()
        assert torch.equal(used, batch.documents[0] >= 0)
        for number in documents.unique():
            assert len(np.unique(document_of[tokens[documents == number].numpy()])) == 1
        predicted += targets.tolist()
    assert len(predicted) == sum(lengths) - len(lengths)
    assert len(set(predicted)) == len(predicted)


def test_rows_say_which_source_they_are_of(make_split: MakeSplit) -> None:
    batches = Batches(make_split([500], [500], weights=[1, 1]), seq_len=8, batch_size=16)
    batch = batches[0]
    assert torch.equal(batch.sources, batch.tokens[:, 0] // 1_000_000)
    assert set(batch.sources.tolist()) == {0, 1}
    assert batches.source_names == ("source0", "source1")


def test_a_small_source_starts_over_while_a_large_one_goes_on(make_split: MakeSplit) -> None:
    batches = Batches(make_split([20_000], [25], weights=[1, 1]), seq_len=8, batch_size=100)
    rows = torch.cat([batches[step].tokens[batches[step].sources == 0] for step in range(10)])
    assert len(set(rows[:, 0].tolist())) == len(rows)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"seq_len": 0}, "seq_len=0 is less than 1; choose 1 or more"),
        ({"batch_size": -1}, "batch_size=-1 is less than 1; choose 1 or more"),
        ({"seq_len": 10}, "'source0' has 10 training tokens, fewer than one window of"),
        ({"seq_len": 10, "packing": "random_windows"}, "add text or reduce seq_len"),
    ],
)
def test_impossible_batches_are_refused(make_split: MakeSplit, change: dict, line: str) -> None:
    with pytest.raises(WorkhorseError, match=line.replace("+", r"\+")):
        Batches(make_split([10]), **{"seq_len": 4, "batch_size": 2, **change})


def test_documents_of_one_token_cannot_be_packed(make_split: MakeSplit) -> None:
    with pytest.raises(WorkhorseError, match="no token to predict"):
        Batches(make_split([1, 1]), seq_len=4, batch_size=1, packing="documents")


@given(
    lengths=st.lists(st.integers(2, 50), min_size=1, max_size=3),
    seq_len=st.integers(1, 9),
    batch_size=st.integers(1, 4),
)
def test_validation_predicts_every_token_once(
    make_split: MakeSplit, lengths: Sequence[int], seq_len: int, batch_size: int
) -> None:
    split = make_split(*[[length] for length in lengths])
    batches = list(ValidationBatches(split, seq_len=seq_len, batch_size=batch_size))
    assert {batch.tokens.shape for batch in batches} == {(batch_size, seq_len)}
    targets = torch.cat([batch.targets.flatten() for batch in batches])
    expected = [1_000_000 * s + t for s, length in enumerate(lengths) for t in range(1, length)]
    assert targets[targets != IGNORE].tolist() == expected
    for batch in batches:
        assert torch.equal(batch.targets.amax(1) == IGNORE, batch.sources == -1)


def test_validation_of_packed_documents_predicts_all_but_first_tokens(
    make_split: MakeSplit,
) -> None:
    split = make_split([5, 1, 30, 4], [9])
    batches = ValidationBatches(split, seq_len=8, batch_size=3, packing="documents")
    targets = torch.cat([batch.targets.flatten() for batch in batches])
    firsts = {0, 5, 6, 36, 1_000_000}
    tokens = [*range(40), *range(1_000_000, 1_000_009)]
    assert sorted(targets[targets != IGNORE].tolist()) == [t for t in tokens if t not in firsts]


def test_validation_on_fewer_rows_spreads_them(make_split: MakeSplit) -> None:
    split = make_split([81])
    batches = ValidationBatches(split, seq_len=8, batch_size=2, max_rows=5)
    starts = torch.cat([batch.tokens[batch.sources >= 0] for batch in batches])[:, 0]
    assert starts.tolist() == [0, 16, 32, 48, 64]
    assert len(ValidationBatches(split, seq_len=8, batch_size=2, max_rows=99)) == 5

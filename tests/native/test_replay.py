"""Recorded calls of operators do what the same calls do from Python."""

import gc
import itertools
import pickle
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tests.native.machine import REPLAY, needs
from workhorse.native.replay import Recorder, Recording, Unrecordable

pytestmark = needs("replay")

WEIGHT, TOTAL = torch.randn(4, 4), torch.zeros(4)


def linear(x: Tensor, y: Tensor) -> list[Tensor]:
    """Scalars of all types, views, several results, and arguments by name."""
    first, second = (x @ WEIGHT.t()).mul(2).add(y, alpha=3).split([1, 3], dim=1)
    return [first.expand(-1, 3) + second, x.to(torch.float64) / 3, second.sum(dtype=torch.float64)]


def lists(x: Tensor, y: Tensor) -> list[Tensor]:
    """Of tensors, of tensors that may be missing, of numbers, and empty ones."""
    rows = torch.tensor([2, 0])
    joined = torch.stack([x, y]).sum([0, 1])
    return [torch.cat([x, joined[None], y]), x[:, rows], x.new_zeros([]), x.sum([])]


def in_place(x: Tensor, y: Tensor) -> list[Tensor]:
    """On what is given, made and kept."""
    TOTAL.add_(y[0])
    y.mul_(x)
    return [y, x.clone().index_put_([torch.tensor([1])], x[0]).relu_(), TOTAL.clone()]


def masks(x: Tensor, y: Tensor) -> list[Tensor]:
    return [(x > 0)[torch.tensor([2, 0])], x.masked_fill(y > 0, 1)]


def frozen_bias(x: Tensor, y: Tensor) -> list[Tensor]:
    """Whose gradient no operator makes."""
    weight = WEIGHT[0].clone().requires_grad_()
    norm = torch.nn.functional.layer_norm(x, (4,), weight, WEIGHT[1])
    norm.mul(y).sum().backward()
    assert weight.grad is not None
    return [weight.grad]


def with_gradients(x: Tensor, y: Tensor) -> list[Tensor]:
    weight = WEIGHT.clone().requires_grad_()
    (x @ weight).sigmoid().mul(y).sum().backward()
    assert weight.grad is not None
    return [weight.grad]


def inputs() -> list[Tensor]:
    return [torch.randn(4, 4), torch.randn(4, 4)]


def record(function: Callable[..., Sequence[Tensor | None]], given: Sequence[Tensor]) -> Recording:
    recorder = Recorder(given)
    with recorder:
        results = function(*given)
    return REPLAY.record(recorder, results)


@pytest.mark.parametrize("function", [linear, lists, masks, in_place, with_gradients, frozen_bias])
def test_calls_give_the_same_for_other_inputs(function: Callable[..., list[Tensor]]) -> None:
    recording = record(function, inputs())
    for _ in range(2):
        given = inputs()
        TOTAL.zero_()
        expected = function(*(one.clone() for one in given))
        TOTAL.zero_()
        for ours, plain in zip(recording.run(given), expected, strict=True):
            assert ours is not None
            assert ours.dtype == plain.dtype
            assert torch.equal(ours, plain)


def test_what_was_there_before_is_read_as_it_is_now() -> None:
    weight = torch.randn(4, 4)
    recording = record(lambda x: [x @ weight, None], [torch.randn(2, 4)])
    weight.fill_(1)
    x = torch.randn(2, 4)
    product, missing = recording.run([x])
    assert missing is None
    assert product is not None
    assert torch.equal(product, x @ weight)


@pytest.mark.parametrize(
    "reads",
    [
        Tensor.tolist,
        Tensor.item,
        bool,
        lambda x: x.detach().numpy(),
        Tensor.nonzero,
        lambda x: x[x > 0],
        lambda x: torch.tensor_split(x, torch.tensor([0])),
        lambda x: setattr(x, "data", x + 1),
    ],
)
def test_what_reads_numbers_but_by_operators_is_refused(reads: Callable[[Tensor], object]) -> None:
    with pytest.raises(Unrecordable), Recorder([]):
        reads(torch.ones(1))


def test_random_numbers_are_drawn_anew() -> None:
    recording = record(lambda x: [torch.dropout(x, 0.5, train=True)], inputs()[:1])
    x = torch.ones(4, 4)
    torch.manual_seed(3)
    expected = [torch.dropout(x, 0.5, train=True) for _ in range(2)]
    torch.manual_seed(3)
    for one in expected:
        (ours,) = recording.run([x])
        assert ours is not None
        assert torch.equal(ours, one)


def test_an_input_is_one_tensor() -> None:
    x = torch.ones(1)
    with pytest.raises(Unrecordable, match="twice"):
        Recorder([x, x])


def test_what_cannot_be_kept_is_refused() -> None:
    with pytest.raises(Unrecordable, match=r"_foreach_mul: workhorse: .*float"):
        record(lambda x: torch._foreach_mul([x, x + 1], [1.0, 2.0]), inputs()[:1])


def test_a_result_that_nothing_made_is_refused() -> None:
    with pytest.raises(Unrecordable, match="no recorded call"):
        record(lambda _: [WEIGHT], inputs()[:1])


def test_tensors_are_released_after_their_last_use() -> None:
    alive: list[int] = []
    made: list[weakref.ref[Tensor]] = []

    def chain(x: Tensor) -> list[Tensor]:
        for _ in range(5):
            x = x + 1
            made.append(weakref.ref(x))
            alive.append(sum(one() is not None for one in made))
        return [x]

    recording = record(chain, inputs()[:1])
    gc.collect()
    assert max(alive) <= 2
    assert not any(one() is not None for one in made)
    with torch.profiler.profile(profile_memory=True) as profile:
        recording.run([torch.zeros(1 << 20)])
    events = profile.profiler.kineto_results.events()
    changes = sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]")
    assert len(changes) > 5, "each of five tensors comes and goes"
    assert max(itertools.accumulate(size for _, size in changes)) < 4 * 4 << 20, "with the input"


def test_a_copy_makes_recordings() -> None:
    recorder = Recorder([x := torch.ones(2)])
    with recorder:
        y = x * 3
    (made,) = pickle.loads(pickle.dumps(REPLAY)).record(recorder, [y]).run([x + 1])
    assert made is not None
    assert made.tolist() == [6, 6]


def test_inputs_are_counted() -> None:
    recording = record(lambda x: [x + 1], inputs()[:1])
    with pytest.raises(RuntimeError, match="a recording of 1 inputs got 2"):
        recording.run(inputs())

"""AdamW updates as one compiled loop per weight, and optimizer updates as CUDA graphs.

Without compilation a GPU runs twenty kernels per weight, and each kernel reads and writes all
elements. The compiled loop reads and writes each element once.

A GPU updates a weight faster than Python launches the kernel, so the launches are recorded in a
CUDA graph. A graph can be replayed if all tensors have the same addresses as before. Weights and
their state keep their addresses. Gradients usually do too: if the same sizes are requested in the
same order, a device's allocator returns the same addresses.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from workhorse.optim.master_weights import join, split


def adamw_(  # noqa: PLR0917 - tensors by position, so that their sizes can be marked as varying
    weight: Tensor,
    low_bits: Tensor,
    mean: Tensor,
    mean_square: Tensor,
    gradient: Tensor,
    numbers: Tensor,
    grad_scale: Tensor,
    constants: Tensor,
) -> None:
    """AdamW update of one weight and its state, in place; `compiled_adamw_` compiles it.

    All scalars are tensors. For Python floats, PyTorch's compiler (2.11 and 2.13) compiled again
    for each value, or used the code for another value.

    Args:
        weight: (n,) bfloat16.
        low_bits: (n,) the low 16 bits of the float32 weight; see `master_weights.split`.
        mean: (n,) running mean of the gradient, bfloat16 or float32.
        mean_square: (n,) running mean of the squared gradient, float32.
        gradient: (n,) of any floating-point dtype.
        numbers: (4,) float32, the scalars that change at each step; see `numbers_of`.
        grad_scale: () float32, factor of the gradient; if it is not finite, nothing changes.
        constants: (5,) float32, the scalars that never change; see `constants_of`.
    """
    beta1, of_gradient, beta2, of_square, eps = constants.unbind()
    learning_rate, kept, correction1, correction2 = numbers.unbind()
    master, skips = join(weight, low_bits), ~grad_scale.isfinite()
    step = gradient.float() * grad_scale
    new_mean = mean.float() * beta1 + step * of_gradient
    new_square = mean_square * beta2 + step.square() * of_square
    root = (new_square / correction2).sqrt() + eps
    moved = master * kept - learning_rate / correction1 * new_mean / root
    rounded, lower = split(torch.where(skips, master, moved))
    weight.copy_(rounded)
    low_bits.copy_(lower)
    mean.copy_(torch.where(skips, mean, new_mean.to(mean.dtype)))
    mean_square.copy_(torch.where(skips, mean_square, new_square))


def constants_of(beta1: float, beta2: float, eps: float, device: torch.device) -> Tensor:
    """Return `beta1`, `1 - beta1`, `beta2`, `1 - beta2` and `eps` as one float32 tensor."""
    return torch.tensor([beta1, 1 - beta1, beta2, 1 - beta2, eps], device=device)


def numbers_of(
    updates: list[Tensor], learning_rate: float, kept: float, beta1: float, beta2: float
) -> Tensor:
    """Return the scalars of a step for each weight, as one tensor.

    A row is `learning_rate`, `kept`, `1 - beta1 ** updates` and `1 - beta2 ** updates`.

    Args:
        updates: for each weight a tensor (), its number of updates including this one.
        learning_rate: the learning rate of this step.
        kept: factor of the weights, `1 - learning_rate · weight_decay`.
        beta1: decay rate of the mean.
        beta2: decay rate of the mean of squares.

    Returns:
        (weights, 4) float32. A row's address is a multiple of 16 bytes, as the compiler requires.
    """
    # In float64: `1 - beta ** counts` of a beta near 1 would lose digits in float32.
    counts = torch.stack(updates).double()
    columns = [torch.full_like(counts, number) for number in (learning_rate, kept)]
    columns += [1 - beta**counts for beta in (beta1, beta2)]
    return torch.stack(columns, dim=1).float()


@cache
def compiled_adamw_() -> Callable[..., None]:
    """Return the function `adamw_`, compiled for weights of any size."""
    compiled: Callable[..., None] = torch.compile(adamw_)

    def update(*tensors: Tensor) -> None:
        for tensor in tensors[:5]:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        compiled(*tensors)

    return update


log = logging.getLogger(__name__)

MOST_RECORDINGS = 4
"""Maximum number of sets of tensor addresses that `Recorded` remembers; the oldest is dropped."""

Update = Callable[[], object]
Recorder = Callable[[Update], Update]
"""A function that records an update without running it, and returns a function that replays it."""


class Recorded:
    """Runs optimizer updates, and replays them as CUDA graphs if tensor addresses repeat.

    The first call with a set of addresses runs the update. The second call records and replays it.

    Args:
        recorder: records an update; None for `record_graph`.
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        self._recorder: Recorder | None = recorder or record_graph
        self._by_place: dict[tuple[object, ...], Update | None] = {}
        """Recordings by tensor addresses; None if the update ran but is not recorded yet."""

    def __getstate__(self) -> dict[str, Any]:
        """State for pickling, without the recordings: they are only valid for these tensors."""
        return vars(self) | {"_by_place": {}}

    def __call__(self, update: Update, places: Sequence[Tensor]) -> None:
        """Run an update, or replay its CUDA graph.

        Args:
            update: a function that launches the same kernels whenever its tensors have the same
                addresses, and reads all numbers that change from tensors. It must not wait for the
                device.
            places: all tensors that the update reads or writes, except those whose addresses never
                change.
        """
        place = tuple((one.data_ptr(), one.dtype, one.stride()) for one in places)
        known = self._by_place.get(place)
        if known is None and place in self._by_place and self._recorder is not None:
            try:
                with torch.cuda.device_of(places[0]):  # only the current device is recorded
                    known = self._by_place[place] = self._recorder(update)
            except RuntimeError as error:
                self._recorder = None
                cause = error.__context__ or error
                log.warning(
                    "optimizer updates cannot be recorded and run without a CUDA graph: %s", cause
                )
        if known is not None:
            known()
            return
        update()
        self._by_place[place] = None
        if len(self._by_place) > MOST_RECORDINGS:
            del self._by_place[next(iter(self._by_place))]


def record_graph(update: Update) -> Update:
    """Capture a CUDA graph of an update, without running it; return a function that replays it.

    `torch.cuda.graph` is not used, because it first releases cached memory. New tensors would then
    get other addresses.
    """
    current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    aside.wait_stream(current)
    with torch.cuda.stream(aside):
        # Another thread may allocate memory meanwhile: it reads batches.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            update()
        finally:
            graph.capture_end()
    current.wait_stream(aside)
    return graph.replay

"""Updates as one compiled loop or as a CUDA graph.

With PyTorch's operators a GPU launches twenty kernels for each weight, and reads and writes its
numbers as often; this reads and writes each once.

A GPU updates a weight faster than Python launches the kernel that does it. Weights and their state
stay where they are, and so do gradients from step to step, as a rule: the allocator of a device
that is asked for the same sizes in the same order gives the same addresses.
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
    shrink: Tensor,
    constants: Tensor,
) -> None:
    """Update a weight and its state in place.

    All numbers are tensors: with floats PyTorch's compiler made a program for each value, or took
    that of another value from its cache (2.11 and 2.13).

    Args:
        weight: (n,) bfloat16.
        low_bits: (n,) the low 16 bits of its float32 value; see `master_weights.split`.
        mean: (n,) running mean of the gradient, bfloat16 or float32.
        mean_square: (n,) running mean of its square, float32.
        gradient: (n,) of any floating-point dtype.
        numbers: (4,) float32, of this weight's step: see `numbers_of`.
        shrink: () float32, multiplies the gradient; if it is not finite, nothing changes.
        constants: (5,) float32: see `constants_of`.
    """
    beta1, of_gradient, beta2, of_square, eps = constants.unbind()
    learning_rate, kept, correction1, correction2 = numbers.unbind()
    master, skips = join(weight, low_bits), ~shrink.isfinite()
    step = gradient.float() * shrink
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
    """`beta1`, `1 - beta1`, `beta2`, `1 - beta2` and `eps`, each rounded to float32 once."""
    return torch.tensor([beta1, 1 - beta1, beta2, 1 - beta2, eps], device=device)


def numbers_of(
    updates: list[Tensor], learning_rate: float, kept: float, beta1: float, beta2: float
) -> Tensor:
    """`learning_rate`, `kept`, `1 - beta1 ** updates` and `1 - beta2 ** updates` of each weight.

    Args:
        updates: () each, how many there are with this one.
        learning_rate: after the schedule.
        kept: what a step leaves of the weight, `1 - learning_rate · weight_decay`.
        beta1: decay rate of the mean.
        beta2: decay rate of the mean of squares.

    Returns:
        (weights, 4) float32. A row's address is a multiple of 16 bytes, as the compiler wants it.
    """
    counts = torch.stack(updates).double()
    columns = [torch.full_like(counts, number) for number in (learning_rate, kept)]
    columns += [1 - beta**counts for beta in (beta1, beta2)]
    return torch.stack(columns, dim=1).float()


@cache
def compiled_adamw_() -> Callable[..., None]:
    """`adamw_`, compiled for weights of any size."""
    compiled: Callable[..., None] = torch.compile(adamw_)

    def update(*tensors: Tensor) -> None:
        for tensor in tensors[:5]:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        compiled(*tensors)

    return update


log = logging.getLogger(__name__)

MOST_RECORDINGS = 4
"""Places of the tensors that are known, recorded or met once; the oldest one goes first."""

Update = Callable[[], object]
Recorder = Callable[[Update], Update]
"""Gives what runs a function again, without running it."""


class Recorded:
    """Runs an update: plainly where its tensors lie for the first time, then from a recording.

    Args:
        recorder: None: by a CUDA graph.
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        self._recorder: Recorder | None = recorder or record_graph
        self._by_place: dict[tuple[object, ...], Update | None] = {}
        """None: it ran there once."""

    def __getstate__(self) -> dict[str, Any]:
        """Without the recordings, which are of these tensors."""
        return vars(self) | {"_by_place": {}}

    def __call__(self, update: Update, places: Sequence[Tensor]) -> None:
        """Run an update.

        Args:
            update: launches the same kernels each time that its tensors lie in the same places,
                and reads all numbers that change from tensors. It never waits for the device.
            places: all tensors that it reads and writes, but for those that never move.
        """
        place = tuple((one.data_ptr(), one.dtype, one.stride()) for one in places)
        known = self._by_place.get(place)
        if known is None and place in self._by_place and self._recorder is not None:
            try:
                with torch.cuda.device_of(places[0]):  # its kernels' device is recorded, no other
                    known = self._by_place[place] = self._recorder(update)
            except RuntimeError as error:
                self._recorder = None
                cause = error.__context__ or error
                log.warning("updates cannot be recorded, and are made without: %s", cause)
        if known is not None:
            known()
            return
        update()
        self._by_place[place] = None
        if len(self._by_place) > MOST_RECORDINGS:
            del self._by_place[next(iter(self._by_place))]


def record_graph(update: Update) -> Update:
    """Record the kernels of a function on the current CUDA device; returns what launches them.

    Recording does not run them. `torch.cuda.graph` would give free memory back first, after which
    tensors lie elsewhere.
    """
    current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    aside.wait_stream(current)
    with torch.cuda.stream(aside):
        # Other threads may allocate meanwhile: one reads batches.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            update()
        finally:
            graph.capture_end()
    current.wait_stream(aside)
    return graph.replay

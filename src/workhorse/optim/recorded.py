"""An update as a CUDA graph: the kernels of all weights are launched at once, from a recording.

A GPU updates a weight faster than Python launches the kernel that does it. Weights and their state
stay where they are, and so do gradients from step to step, as a rule: the allocator of a device
that is asked for the same sizes in the same order gives the same addresses.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

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

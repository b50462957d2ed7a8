"""What a training makes less: the seam that every way of training stands on."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn


class Rows(Protocol):
    """A batch, or some rows of it: what they are is between the data and the objective."""

    def __len__(self) -> int: ...

    def rows(self, start: int, stop: int) -> Self: ...

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self: ...


class Outcome(NamedTuple):
    """What an objective found of some rows. A plain tuple: sharding looks for tensors in it."""

    loss: Tensor
    """To be made less, summed over the rows."""
    count: Tensor
    """What the sum over a whole batch is divided by, of these rows: predictions, pairs …"""
    figures: dict[str, Tensor]
    """To be logged, without gradients, summed and divided likewise. `loss` is what is shown as the
    loss and validated; where it is left out, that is all that is made less."""


class Objective(nn.Module, ABC):
    """A module from rows to what is made less of them.

    It holds the decoder, and its forward is what gets sharded, since sharding's hooks fire on
    `forward` alone.
    """

    @abstractmethod
    def count(self, batch: Any) -> Tensor:
        """What the summed loss of a batch is divided by, before any of it passes.

        Asked of the whole batch, so that the gradient does not depend on its micro-batches.
        """

    @abstractmethod
    def forward(self, batch: Any) -> Outcome:
        """Loss, count and figures of some rows of a batch, which are on the decoder's device."""

    def after_update(self, finite: bool) -> None:
        """Told of every step's end, and whether the weights were updated."""

    def forget(self) -> None:
        """Drop what passed since the last step's end; there will be no update for it."""

    def state_of_update(self) -> dict[str, Any]:
        """To be logged of the last update beside the figures."""
        return {}

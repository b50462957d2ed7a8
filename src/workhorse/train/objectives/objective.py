"""The interface of a training objective, which every way of training implements."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn


class Rows(Protocol):
    """A batch, or part of it; its contents concern only the data and the objective."""

    def __len__(self) -> int: ...

    def rows(self, start: int, stop: int) -> Self: ...

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self: ...


class Outcome(NamedTuple):
    """The result of an objective for a number of rows; a tuple, in which sharding finds tensors."""

    loss: Tensor
    """The loss to minimise, summed over the rows."""
    count: Tensor
    """The rows' share of the denominator of a batch's mean: predictions, pairs …"""
    figures: dict[str, Tensor]
    """Sums to be logged, without gradients, divided likewise. `loss` is the loss that is shown and
    validated; without it, that is the loss to minimise."""


class Objective(nn.Module, ABC):
    """A module from rows to the loss to minimise.

    It holds the decoder, and is the module that is sharded, since the hooks of sharding fire on
    `forward` alone.
    """

    @abstractmethod
    def count(self, batch: Any) -> Tensor:
        """The denominator of a batch's mean loss, before any of its rows pass.

        It is counted over the whole batch, so that the gradient does not depend on micro-batches.
        """

    @abstractmethod
    def forward(self, batch: Any) -> Outcome:
        """Loss, count and figures of a micro-batch on the decoder's device."""

    def tallies(self) -> list[Tensor]:
        """What `after_update` reads, in whole numbers; each process adds those of the others."""
        return []

    def after_update(self, finite: bool) -> None:
        """Called at the end of every step; `finite`: whether the weights were updated."""

    def forget(self) -> None:
        """Discard the rows that passed since the last step's end; no update follows."""

    def state_of_update(self) -> dict[str, Any]:
        """Figures of the last update, to be logged besides those of the rows."""
        return {}


class Wrapped(Objective):
    """An objective that wraps another and changes only `forward`.

    Args:
        objective: the other one.
    """

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.objective = objective

    def count(self, batch: Any) -> Tensor:
        return self.objective.count(batch)

    def tallies(self) -> list[Tensor]:
        return self.objective.tallies()

    def after_update(self, finite: bool) -> None:
        self.objective.after_update(finite)

    def forget(self) -> None:
        self.objective.forget()

    def state_of_update(self) -> dict[str, Any]:
        return self.objective.state_of_update()

"""The interface of training objectives: a config, and the module that it builds.

An objective knows nothing of micro-batches, processes or devices. `ModelObjective.score` gives it
the log-probabilities of a batch's targets, however model and sequences are divided.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from workhorse.config.base import Config
from workhorse.data import Batch
from workhorse.nn import IGNORE, Decoder, TokenLogprobs
from workhorse.nn.shapes import Hidden

if TYPE_CHECKING:
    from workhorse.parallel.division.sequences import SequenceTeam
    from workhorse.parallel.division.teams import Teams

Denominator = Literal["tokens", "sequences", "groups"]
"""What a batch's loss is a mean over: predictions (by their weights, if these are given), rows with
a prediction, or groups of rows."""


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


class ObjectiveConfig(Config):
    """The options of an objective, which stands below its config.

    Attributes:
        needs: fields of a `Batch` that are not always there and that it cannot do without.
    """

    needs: ClassVar[tuple[str, ...]] = ()

    @property
    def rows_together(self) -> int:
        """How many rows must pass together: batches and micro-batches are multiples of it."""
        return 1

    @abstractmethod
    def build(self, decoder: Decoder, team: "SequenceTeam | None" = None) -> "Objective":
        """The objective of a decoder.

        Args:
            decoder: the model to train.
            team: has the other parts of the sequences, where these are divided.
        """


class Objective(nn.Module, ABC):
    """A module from rows to the loss to minimise.

    It holds the decoder, and is the module that is sharded, since the hooks of sharding fire on
    `forward` alone.
    """

    decoder: Decoder
    denominator: ClassVar[Denominator] = "tokens"

    @abstractmethod
    def count(self, batch: Any) -> Tensor:
        """The denominator of a batch's mean loss, before any of its rows pass.

        It is counted over the whole batch, so that the gradient does not depend on micro-batches.
        """

    @abstractmethod
    def forward(self, batch: Any) -> Outcome:
        """Loss, count and figures of a micro-batch on the decoder's device."""

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters to train, by name: those of the decoder by their names in it."""
        return {
            name.removeprefix("decoder."): parameter
            for name, parameter in self.named_parameters()
            if parameter.requires_grad
        }

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


class ModelObjective(Objective):
    """An objective of the log-probabilities that a decoder gives a batch's targets.

    Args:
        decoder: the model to train. A frozen model that an objective compares it with is no module
            of it: hold that in a tuple.
        logprobs: from hidden states to log-probabilities, or to a loss.
        team: has the other parts of the sequences, where these are divided.
    """

    def __init__(
        self, decoder: Decoder, logprobs: TokenLogprobs, team: "SequenceTeam | None" = None
    ) -> None:
        super().__init__()
        self.decoder = decoder
        self.logprobs = logprobs
        self.team = team

    def count(self, batch: Batch) -> Tensor:
        counted = batch.targets != IGNORE
        if self.denominator == "groups" and batch.group is not None:
            return torch.tensor(len(batch.group.unique()))
        if self.denominator != "tokens":
            return counted.any(dim=1).sum()
        return counted.sum() if batch.weights is None else (batch.weights * counted).sum()

    def score(self, batch: Batch, **options: Any) -> Any:
        """What `logprobs` gives for the batch.

        Args:
            batch: the own tokens of sequences that are divided.
            options: of `logprobs`.
        """
        head = self.decoder.head
        matrix = self.logprobs.matrix(head)  # before x is computed, see `NativeLogprobs`
        return self.logprobs(self._hidden(batch), batch.targets, head, matrix=matrix, **options)

    def over_sequences(self, of_own_tokens: Tensor) -> Tensor:
        """Sums over whole sequences, of sums over the own tokens of each, with a gradient.

        All processes of the team must go on alike.
        """
        return of_own_tokens if self.team is None else self.team.summed(of_own_tokens)

    def _hidden(self, batch: Batch) -> Hidden:
        if self.team is None:
            return self.decoder.hidden(batch.tokens, documents=batch.documents)
        view = self.team.view(self.decoder, batch.tokens, batch.documents)
        return self.decoder.hidden(batch.tokens, cache=view)


class Wrapped(Objective):
    """An objective that wraps another and changes only `forward`.

    Args:
        objective: the other one.
    """

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.objective = objective

    @property
    def decoder(self) -> Decoder:
        """The model to train."""
        return self.objective.decoder

    def count(self, batch: Any) -> Tensor:
        return self.objective.count(batch)

    def trainable(self) -> dict[str, nn.Parameter]:
        return self.objective.trainable()

    def tallies(self) -> list[Tensor]:
        return self.objective.tallies()

    def after_update(self, finite: bool) -> None:
        self.objective.after_update(finite)

    def forget(self) -> None:
        self.objective.forget()

    def state_of_update(self) -> dict[str, Any]:
        return self.objective.state_of_update()


class CountedElsewhere(Wrapped):
    """Another objective, whose result another process of a team counts; here it has gradients."""

    def forward(self, batch: Batch) -> Outcome:
        loss, count, figures = self.objective(batch)
        none = {name: torch.zeros_like(figure) for name, figure in figures.items()}
        return Outcome(loss - loss.detach(), torch.zeros_like(count), none)


def counts_here(objective: Objective, teams: "Teams") -> bool:
    """Whether this process counts an objective's result, which all of a team see.

    Predictions are counted by whoever has them, sequences and groups once for all their parts.
    """
    team = teams.sequences
    first = team is None or team.group.is_first
    return teams.has_loss and (first or objective.denominator == "tokens")


class Divided(Wrapped):
    """Another objective, of this process's tokens of every row; it counts whole rows.

    Args:
        objective: of these tokens.
        team: has the others.
    """

    def __init__(self, objective: Objective, team: "SequenceTeam") -> None:
        super().__init__(objective)
        self.team = team

    def forward(self, batch: Batch) -> Outcome:
        return self.objective(batch.columns(self.team.own(batch.tokens.shape[1])))

"""The interface of training objectives: a config, and the module that it builds.

The code of an objective need not handle micro-batches, ranks or devices. `ModelObjective.score`
returns the log-probabilities of targets, also if model or sequences are split among ranks.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from pydantic import Field
from torch import Tensor, nn

from workhorse.config.base import Config, ConfigError, OnResume
from workhorse.data import Batch
from workhorse.nn import IGNORE, Decoder, TokenLogprobs
from workhorse.nn.logprobs import count_of
from workhorse.nn.shapes import Hidden

if TYPE_CHECKING:
    from workhorse.parallel.division.sequences import ContextParallelGroup
    from workhorse.parallel.division.teams import Teams
    from workhorse.train.objectives.value_head import ValuesConfig

MOST = 1e6
"""Largest weight, factor or limit in a loss. Larger ones can exceed float32."""
Weight = Annotated[float, OnResume.CONTINUES, Field(ge=0, le=MOST)]
Scale = Annotated[float, OnResume.CONTINUES, Field(ge=1 / MOST, le=MOST)]
Team: TypeAlias = "ContextParallelGroup | None"
"""The ranks that each have a part of the same sequences; None if sequences are not split."""
Denominator = Literal["tokens", "sequences", "groups"]
"""Denominator of a batch's mean loss: the number of predictions (or the sum of their weights), of
rows with a prediction, or of groups of rows."""


class Outcome(NamedTuple):
    """The result of an objective for some rows. It is a tuple so that FSDP finds its tensors."""

    loss: Tensor
    """The loss to minimise, summed over the rows."""
    count: Tensor
    """Contribution of the rows to the denominator of the mean loss, such as their predictions."""
    figures: dict[str, Tensor]
    """Values to log, without gradients, summed over the rows like the loss. `loss` is the loss to
    report and validate; without this key, the loss to minimise is reported."""


class ObjectiveConfig(Config):
    """Base class of the options of an objective.

    Attributes:
        needs: the optional fields of a `Batch` that the objective requires.
        headline: keys of the logged figures that show progress, the most important first. Figures
            that a run does not log are omitted. Without `loss` in it, the loss measures nothing.
        loss_unit: the unit of the logged loss; empty if it has none.
        source: where its rows come from: from the data, from completions of the model, or either.
        rewarded: True if completions need a reward.
    """

    if TYPE_CHECKING:
        kind: str
    needs: ClassVar[tuple[str, ...]] = ()
    headline: ClassVar[tuple[str, ...]] = ("loss",)
    loss_unit: ClassVar[str] = ""
    source: ClassVar[Literal["data", "rollouts", "either"]] = "data"
    rewarded: ClassVar[bool] = False

    @property
    def reference(self) -> Literal["sequence", "token"] | None:
        """Whose log-probabilities under the initial model it needs: of sequences, or of tokens."""
        return "sequence" if "reference" in self.needs else None

    @property
    def models(self) -> dict[str, str]:
        """The stored models that it learns from, by name. They have the tokens of the run."""
        return {}

    @property
    def critic(self) -> "ValuesConfig | None":
        """The value head that it trains with the model; None for none."""
        return None

    def identity(self) -> dict[str, str]:
        """Return fingerprints, by name, that stay the same when a run resumes."""
        return {}

    def check_rows(self, row: Batch) -> None:
        """Raise ConfigError if rows of the data are not of the kind that the objective needs."""
        wanted = "pairs" if "group" in self.needs else "labels" if "values" in self.needs else ""
        given = "pairs" if row.group is not None else "labels" if row.values is not None else ""
        if wanted and wanted != given:
            fields = {"pairs": "chosen and rejected", "labels": "prompt, completion and label"}
            raise ConfigError(
                f"the objective {self.kind} needs {wanted}, which this data does not have; set "
                f"data.corpus to conversations with rows={wanted} (records with {fields[wanted]})",
                "train.objective",
            )
        if given and not wanted:
            raise ConfigError(
                f"{self.kind} would learn the rejected answers of {given} too; choose another "
                "kind, such as dpo or kto",
                "train.objective",
            )

    @property
    def needs_all_logits(self) -> str:
        """The setting that needs all logits of a token on one rank; empty if none does."""
        return ""

    @property
    def rows_together(self) -> int:
        """Number of rows that one pass must contain together, such as 2 for a loss of pairs."""
        return 1

    def synthetic(self, tokens: Tensor, documents: Tensor | None = None) -> Batch:
        """Create a batch with all fields that the objective needs, to measure memory or time.

        Args:
            tokens: (batch, seq) token ids.
            documents: (batch, seq) document ids, or None.
        """
        rows = torch.zeros(len(tokens), device=tokens.device)
        order = torch.arange(len(tokens), device=tokens.device)
        optional = {"group": order // self.rows_together, "values": rows, "reference": rows}
        needed = {name: optional[name] for name in self.needs if name in optional}
        return Batch(tokens, tokens, documents, torch.zeros_like(order), **needed)

    @abstractmethod
    def build(self, decoder: Decoder, team: Team = None) -> "Objective":
        """Build the objective of a decoder.

        Args:
            decoder: the model to train.
            team: see `Team`.
        """


class Objective(nn.Module, ABC):
    """Module that computes the loss to minimise from the rows of a batch.

    It contains the decoder. FSDP shards this module rather than the decoder, because FSDP's hooks
    run only on `forward`.
    """

    decoder: Decoder
    denominator: Denominator = "tokens"

    @abstractmethod
    def count(self, batch: Any) -> Tensor:
        """Return the denominator of a batch's mean loss, before the first forward pass.

        It is counted over the whole batch, so the gradient does not depend on micro-batches.
        """

    @abstractmethod
    def forward(self, batch: Any) -> Outcome:
        """Compute the loss of a micro-batch on the decoder's device; see `Outcome`."""

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters to train, by name; the prefix `decoder.` is removed."""
        return {
            name.removeprefix("decoder."): parameter
            for name, parameter in self.named_parameters()
            if parameter.requires_grad
        }

    def frozen_models(self) -> list[Decoder]:
        """Return the models that this objective compares with, which only it executes."""
        return []

    def tallies(self) -> list[Tensor]:
        """Return this rank's count tensors, which the training step sums over the ranks, in place.

        `after_update` then uses the sums.
        """
        return []

    def after_update(self, finite: bool) -> None:
        """Hook that runs at the end of every step.

        Args:
            finite: True if the weights were updated.
        """

    def forget(self) -> None:
        """Discard the counts of passes since the last update, because no update follows."""

    def state_of_update(self) -> dict[str, Any]:
        """Return values about the last update, to log in addition to `Outcome.figures`."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return the state to store in a checkpoint besides the parameters, as plain data."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the result of `state`; it is empty if another kind of objective was saved."""


class ModelObjective(Objective):
    """Base class of objectives that use the log-probabilities of a batch's targets.

    Args:
        decoder: the model to train. Keep a frozen reference model in a tuple, so that it is not
            registered as a submodule.
        logprobs: computes log-probabilities, or a loss, from hidden states.
        team: see `Team`.
    """

    def __init__(self, decoder: Decoder, logprobs: TokenLogprobs, team: Team = None) -> None:
        super().__init__()
        self.decoder = decoder
        self.logprobs = logprobs
        self.team = team

    def count(self, batch: Batch) -> Tensor:
        if self.denominator == "tokens":
            return count_of(batch.targets, batch.weights)
        counted = (batch.targets != IGNORE).any(dim=1)
        if self.denominator == "groups" and batch.group is not None:
            counted[1:] &= batch.group[1:] != batch.group[:-1]  # the first row of each group
        return counted.sum()

    def score(self, batch: Batch, **options: Any) -> Any:
        """Run the decoder and `logprobs` on a batch, and return the result of `logprobs`.

        If sequences are split, `batch` has only this rank's tokens. `options` are passed to
        `logprobs`.
        """
        return self.hidden_and_score(batch, **options)[1]

    def hidden_and_score(self, batch: Batch, **options: Any) -> tuple[Hidden, Any]:
        """Return the hidden states of a batch, and the result of `score`."""
        head = self.decoder.head
        matrix = self.logprobs.matrix(head)  # must precede the forward pass, see `NativeLogprobs`
        x = self.hidden(self.decoder, batch)
        return x, self.logprobs(x, batch.targets, head, matrix=matrix, **options)

    def sequence_logprobs(self, batch: Batch) -> Tensor:
        """Compute the weighted sum of the log-probabilities of each row's targets, (rows).

        If sequences are split among ranks, all ranks get the sums over whole sequences.
        """
        of_tokens = self.score(batch).target
        return self.over_sequences((of_tokens * target_weights(batch)).sum(dim=1))

    def sequence_weights(self, batch: Batch) -> Tensor:
        """Compute the sum of the weights of each row's targets, (rows); see `sequence_logprobs`."""
        return self.over_sequences(target_weights(batch).sum(dim=1))

    def over_sequences(self, of_own_tokens: Tensor) -> Tensor:
        """Sum a value per sequence over the ranks that have parts of the sequences.

        `of_own_tokens` has the sum over this rank's tokens for each sequence. The result has a
        gradient. This is a collective: all ranks of the group must call it.
        """
        return of_own_tokens if self.team is None else self.team.summed(of_own_tokens)

    def hidden(self, decoder: Decoder, batch: Batch) -> Hidden:
        """Compute a decoder's hidden states; if sequences are split, for this rank's tokens."""
        if self.team is None:
            return decoder.hidden(batch.tokens, documents=batch.documents)
        view = self.team.view(decoder, batch.tokens, batch.documents)
        return decoder.hidden(batch.tokens, cache=view)


def target_weights(batch: Batch) -> Tensor:
    """Return the loss weight of each target, (batch, seq) float32; 0 if the target is `IGNORE`."""
    counted = batch.targets != IGNORE
    return counted.float() if batch.weights is None else batch.weights.where(counted, 0)


class Wrapped(Objective):
    """Base class of objectives that wrap another one and change only `forward`."""

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

    def frozen_models(self) -> list[Decoder]:
        return self.objective.frozen_models()

    def tallies(self) -> list[Tensor]:
        return self.objective.tallies()

    def after_update(self, finite: bool) -> None:
        self.objective.after_update(finite)

    def forget(self) -> None:
        self.objective.forget()

    def state_of_update(self) -> dict[str, Any]:
        return self.objective.state_of_update()

    def state(self) -> dict[str, Any]:
        return self.objective.state()

    def load(self, state: dict[str, Any]) -> None:
        self.objective.load(state)


class UncountedObjective(Wrapped):
    """Wraps an objective on a rank whose result must not be added to the total.

    Another rank computes the same result and adds it. On this rank loss, count and figures are 0,
    but the loss keeps its gradient.
    """

    def forward(self, batch: Batch) -> Outcome:
        loss, count, figures = self.objective(batch)
        none = {name: torch.zeros_like(figure) for name, figure in figures.items()}
        return Outcome(loss - loss.detach(), torch.zeros_like(count), none)

    def tallies(self) -> list[Tensor]:
        return [tally.zero_() for tally in super().tallies()]


def counts_here(objective: Objective, teams: "Teams") -> bool:
    """Return True if this rank adds its result of an objective to the total.

    Several ranks may compute the same result; then only one of them adds it. If sequences are split
    among ranks, each rank adds the result of its own predictions, but a result per sequence or
    group is added only by the first of these ranks.
    """
    team = teams.sequences
    first = team is None or team.group.is_first
    return teams.has_loss and (first or objective.denominator == "tokens")


class Divided(Wrapped):
    """Wraps an objective so that `forward` gets only this rank's tokens of every row.

    `count` still gets whole rows. `team` is the group of ranks that sequences are split among.
    """

    def __init__(self, objective: Objective, team: "ContextParallelGroup") -> None:
        super().__init__(objective)
        self.team = team

    def forward(self, batch: Batch) -> Outcome:
        return self.objective(batch.columns(self.team.own(batch.tokens.shape[1])))

"""Distillation: divergences between the predictions of a teacher and of the model."""

import math
from functools import partial
from typing import Annotated, Any, Literal, cast

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from workhorse.checkpoints import mapped_weights
from workhorse.checkpoints.adapted import hash_of
from workhorse.checkpoints.stored import open_stored
from workhorse.config.base import ConfigError, OnResume
from workhorse.data import Batch
from workhorse.devices.tape import recording
from workhorse.errors import WorkhorseError
from workhorse.models.describe import tensors_of
from workhorse.nn import Decoder, TokenLogprobs
from workhorse.nn.logprobs import MOST_WIDE, default_max_logits, log_probabilities
from workhorse.nn.products import rows_at_once, widened
from workhorse.train.objectives.objective import (
    ModelObjective,
    ObjectiveConfig,
    Outcome,
    Team,
    target_weights,
)

LogProbabilities = Float[Tensor, "tokens vocab"]


class DistillConfig(ObjectiveConfig):
    """The divergence of the model from a teacher with the same tokens (GKD, 2306.13649 §3).

    It is the mean over all targets of a batch of the divergence between the full distributions of
    the next token. The sequences come from the data, or are completions of the model (on-policy).
    """

    kind: Literal["distill"] = "distill"
    loss_unit = "nats per token"
    source = "either"
    teacher: str
    """The teacher: a run directory, a Hugging Face directory, a GGUF file or a hub id."""
    beta: Annotated[float, OnResume.CONTINUES] = Field(default=0.0, ge=0, le=1)
    """0: the forward divergence KL(teacher || model); 1: the reverse one, KL(model || teacher).
    Between them: the generalised Jensen-Shannon divergence
    `beta · KL(teacher || m) + (1 - beta) · KL(model || m)`, where m is the mixture
    `beta · teacher + (1 - beta) · model`."""

    @property
    def needs_all_logits(self) -> str:
        return f"objective={self.kind}"

    @property
    def models(self) -> dict[str, str]:
        return {"teacher": self.teacher}

    def identity(self) -> dict[str, str]:
        """Return the SHA-256 of the teacher's weights; see `hash_of`."""
        teacher = open_stored(self.teacher).load_decoder(places=mapped_weights)
        weights = {name: one.detach() for name, one in tensors_of(teacher).items()}
        return {"teacher": hash_of(weights)}

    def build(self, decoder: Decoder, team: Team = None) -> "Distill":
        try:
            stored = open_stored(self.teacher)
        except WorkhorseError as error:
            raise ConfigError(str(error), "train.objective.teacher") from None
        theirs, ours = stored.config.vocab_size, decoder.config.vocab_size
        if theirs != ours:
            raise ConfigError(
                f"the teacher {self.teacher} has vocab_size={theirs}, but the model has {ours}; "
                "choose a teacher with the same tokenizer",
                "train.objective.teacher",
            )
        dtype = next(decoder.parameters()).dtype
        if recording():  # measuring memory needs no values
            teacher = stored.config.build(device=decoder.device, dtype=dtype)
        else:
            teacher = stored.load_decoder(dtype=dtype)
        return Distill(decoder, teacher, self.beta, team)


class Distill(ModelObjective):
    """`Σ divergence(teacher, model)` over all targets, in nats.

    The logits of both models are computed for some of the positions at a time, and again in the
    backward pass.

    Args:
        decoder: the model to train.
        teacher: a model with the same tokens; it is frozen, and moved to the device of the model.
        beta: kind of the divergence, see `DistillConfig`.
        team: see `Team`.
    """

    def __init__(
        self,
        decoder: Decoder,
        teacher: Decoder,
        beta: float = 0.0,
        team: Team = None,
    ) -> None:
        super().__init__(decoder, TokenLogprobs(), team)
        self.teacher = (teacher.eval().requires_grad_(requires_grad=False),)  # not a submodule
        between = partial(jensen_shannon, beta=beta)
        self.divergence = {0.0: forward_kl, 1.0: reverse_kl}.get(beta, between)

    def frozen_models(self) -> list[Decoder]:
        return [*self.teacher]

    def forward(self, batch: Batch) -> Outcome:
        x = self.hidden(self.decoder, batch)
        (teacher,) = self.teacher
        with torch.no_grad():
            y = self.hidden(teacher.to(x.device), batch)
        max_logits = self.logprobs.max_logits or min(default_max_logits(x.device), MOST_WIDE)
        rows = rows_at_once(max_logits // 2, self.decoder.head.vocab_size)  # of two models
        flat = x.flatten(0, 1), y.flatten(0, 1), target_weights(batch).flatten()
        call = cast(Any, checkpoint)
        sums = [
            call(self._divergence_of, *part, use_reentrant=False)
            for part in zip(*(values.split(rows) for values in flat), strict=True)
        ]
        return Outcome(torch.stack(sums).sum(), self.count(batch), {})

    def _divergence_of(self, x: Tensor, y: Tensor, weights: Float[Tensor, " tokens"]) -> Tensor:
        """Sum the weighted divergences at some positions, from the hidden states of both models."""
        (teacher,) = self.teacher
        of_teacher, of_model = (
            log_probabilities(widened(decoder.unembed(part[None])[0]))
            for decoder, part in ((teacher, y), (self.decoder, x))
        )
        return (self.divergence(of_teacher, of_model) * weights).sum()


def kl(of: LogProbabilities, to: LogProbabilities) -> Float[Tensor, " tokens"]:
    """`KL(of || to) = Σ exp(of) · (of - to)` of each row of log-probabilities."""
    return (of.exp() * (of - to)).sum(dim=-1)


def forward_kl(teacher: LogProbabilities, model: LogProbabilities) -> Tensor:
    """`KL(teacher || model)`."""
    return kl(teacher, model)


def reverse_kl(teacher: LogProbabilities, model: LogProbabilities) -> Tensor:
    """`KL(model || teacher)`."""
    return kl(model, teacher)


def jensen_shannon(teacher: LogProbabilities, model: LogProbabilities, beta: float) -> Tensor:
    """The generalised Jensen-Shannon divergence, see `DistillConfig.beta`."""
    mixture = torch.logaddexp(teacher + math.log(beta), model + math.log1p(-beta))
    return beta * kl(teacher, mixture) + (1 - beta) * kl(model, mixture)

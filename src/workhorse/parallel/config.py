"""The section `parallel` of a recipe: how many processes train one model, and how they add up."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from workhorse.config import Config, ConfigError
from workhorse.on_resume import OnResume

Ways = Annotated[int, Field(ge=1)]


class ParallelismConfig(Config):
    """How the work of a step is divided among processes; the batch is that of all of them."""

    data: Annotated[Ways, OnResume.ROUNDED] = 1
    """Processes that each hold the whole model and share the rows of every batch.
    `workhorse train --workers N` starts so many on this machine; under `torchrun` it is the number
    of processes there are."""
    reduction: Annotated[Literal["fast", "exact"], OnResume.ROUNDED] = "fast"
    """How gradients are added up. `fast`: as PyTorch's backend does it, which rounds differently
    for another number of processes. `exact`: in an order that is always the same, so that loss and
    weights have the same bits on any number of processes, one included."""
    logical_shards: Annotated[Ways, OnResume.ROUNDED] = 8
    """Parts of a batch that `exact` computes one by one, in the same shapes whichever process has
    them, and adds up; at least as many as processes. Each takes `micro_batch_size` rows at once."""

    @property
    def parts(self) -> int:
        """Into how many parts the rows of a batch are divided."""
        return self.logical_shards if self.reduction == "exact" else self.data

    @model_validator(mode="after")
    def _shards_for_all(self) -> Self:
        if self.reduction == "exact" and self.logical_shards < self.data:
            raise ConfigError(
                f"logical_shards={self.logical_shards} is less than data={self.data}, so that some "
                "processes have none; choose at least that"
            )
        return self


UNDIVIDED = ParallelismConfig()
"""One process, which adds up as it goes."""

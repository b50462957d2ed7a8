"""The section `parallel` of a recipe: how many processes train one model, and how they add up."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from workhorse.config import Config, ConfigError
from workhorse.on_resume import OnResume

Ways = Annotated[int, Field(ge=1)]


class FastConfig(Config):
    """As PyTorch's backend adds, which rounds differently for another number of processes."""

    kind: Literal["fast"] = "fast"


class ExactConfig(Config):
    """In an order that is always the same.

    Loss and weights have the same bits on any number of processes, one included.
    """

    kind: Literal["exact"] = "exact"
    logical_shards: Ways = 8
    """Parts of a batch that are computed one by one, in the same shapes whichever process has them,
    and added up; at least as many as processes. Each takes `micro_batch_size` rows at once."""


class ParallelismConfig(Config):
    """How the work of a step is divided among processes; the batch is that of all of them."""

    data: Annotated[Ways, OnResume.ROUNDED] = 1
    """Processes that each hold the whole model and share the rows of every batch.
    `workhorse train --workers N` starts so many on this machine; under `torchrun` it is the number
    of processes there are. With an exact `reduction` another number changes nothing."""
    reduction: Annotated[
        FastConfig | ExactConfig, Field(discriminator="kind"), OnResume.ROUNDED
    ] = FastConfig()
    """How gradients are added up."""

    @property
    def is_exact(self) -> bool:
        """Whether the number of processes changes nothing."""
        return isinstance(self.reduction, ExactConfig)

    @property
    def parts(self) -> int:
        """Into how many parts the rows of a batch are divided."""
        exact = self.reduction
        return exact.logical_shards if isinstance(exact, ExactConfig) else self.data

    @model_validator(mode="after")
    def _a_part_for_each(self) -> Self:
        if self.parts < self.data:
            raise ConfigError(
                f"reduction.logical_shards={self.parts} is less than data={self.data}, so that "
                "some processes have none; choose at least that"
            )
        return self


UNDIVIDED = ParallelismConfig()
"""One process, which adds up as it goes."""

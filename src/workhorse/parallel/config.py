"""The section `parallel` of a recipe: how many processes train one model, and how they add up."""

from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from workhorse.config.base import Config, ConfigError, OnResume

Ways = Annotated[int, Field(ge=1)]
DIVIDED = ("data", "shard", "context", "tensor", "pipeline", "expert")
"""The keys that tell into how many parts something is divided."""
NOT_EXACT = {
    "context": "sequences",
    "expert": "experts",
    "tensor": "layers",
    "pipeline": "layers",
}
"""Those that `reduction: exact` does not go with, and what they divide."""
LONGEST_PATIENCE = 1800.0
"""In seconds; after that PyTorch's gloo gives up by itself, and does not say where."""
MICRO_BATCHES = 4
"""For each stage of a pipeline where no `micro_batch_size` is given: its bubble is then less than a
fifth of the time."""


def share_of(whole: int, ways: int, number: int) -> range:
    """The consecutive slice of `range(whole)` that part `number` of `ways` gets."""
    return range(number * whole // ways, (number + 1) * whole // ways)


class FastConfig(Config):
    """In the backend's own order, so that rounding depends on the number of processes."""

    kind: Literal["fast"] = "fast"


class ExactConfig(Config):
    """In a fixed binary tree.

    Loss and weights have the same bits on any number of processes, including one.
    """

    kind: Literal["exact"] = "exact"
    logical_shards: Ways = 8
    """Parts of the batch, each computed in the same shapes whichever process does it, then added
    up; at least as many as processes. Each takes `micro_batch_size` rows at once."""


class MicroBatches(NamedTuple):
    """How the rows of a batch pass through one process, or through those that have the same."""

    rows: int
    """Of a part of the batch, the largest."""
    size: int
    """Rows that pass at once."""
    parts: int
    """Of the batch, that one process passes."""

    @property
    def passes(self) -> int:
        """Micro-batches of a part."""
        return -(-self.rows // self.size)

    @property
    def count(self) -> int:
        """Micro-batches of a step."""
        return self.parts * self.passes


class Coordinates(NamedTuple):
    """The place of a process on the mesh of all, from 0 on each axis; the last runs fastest."""

    pipeline: int
    data: int
    shard: int
    context: int
    tensor: int


class ParallelismConfig(Config):
    """How the work of a step is divided among processes; the batch is that of all of them."""

    data: Annotated[Ways, OnResume.ROUNDED] = 1
    """Replicas: processes that each hold the whole model and take a share of the rows of every
    batch. `workhorse train --workers N` starts N of them on this machine; under `torchrun` it is
    the number of processes. With an exact `reduction` the number changes nothing."""
    shard: Annotated[Ways, OnResume.ROUNDED] = 1
    """Processes that shard weights, gradients and optimizer state (FSDP; ZeRO stage 3, 1910.02054)
    and also share the rows of every batch. With `data` there are that many such groups."""
    context: Annotated[Ways, OnResume.ROUNDED] = 1
    """Processes that split each sequence into consecutive chunks; each takes the keys and values
    before its chunk from the others (2407.21783 §3.3.2). With `shard` above 1 they shard the
    weights too."""
    tensor: Annotated[Ways, OnResume.ROUNDED] = 1
    """Processes that split every layer: each has some heads, hidden features and tokens of the
    vocabulary (1909.08053), and between layers some tokens of each sequence (2205.05198 §4.2.2).
    They communicate most, so they get neighbouring ranks."""
    pipeline: Annotated[Ways, OnResume.ROUNDED] = 1
    """Pipeline stages of consecutive layers (1811.06965); micro-batches alternate one forward and
    one backward pass (1F1B, 2104.04473 §2.2.1). Without a `micro_batch_size` there are at least
    four micro-batches per stage, if there are enough rows. Stages communicate least, so their ranks
    are farthest apart."""
    expert: Annotated[Ways, OnResume.ROUNDED] = 1
    """Of the `data` × `shard` processes, how many share the routed experts of every mixture,
    sending each other tokens (2006.16668 §3). `shard` does not divide experts further."""
    reshard: Annotated[Literal["pass", "step"], OnResume.TAKEN] = "pass"
    """When processes of `shard` free the weights of a layer that they gathered from each other:
    after each of its passes, so that a layer or two are whole at a time; or at the end of the step,
    which gathers them once, however many passes it has, and holds all of them whole. With an exact
    `reduction` gradients then stay whole too, until they are exchanged once."""
    reduction: Annotated[
        FastConfig | ExactConfig, Field(discriminator="kind"), OnResume.ROUNDED
    ] = FastConfig()
    """How gradients are added up."""
    patience: Annotated[float, OnResume.TAKEN] = Field(
        default=LONGEST_PATIENCE, ge=1, le=LONGEST_PATIENCE
    )
    """Seconds that a run of several processes may go without a step (with its validation and save);
    then each prints its stack traces and exits, since one hangs and the rest would wait for it."""

    @property
    def ways(self) -> dict[str, int]:
        """Into how many parts each thing is divided, by the name of its key."""
        return {name: getattr(self, name) for name in DIVIDED}

    @property
    def in_step(self) -> bool:
        """Whether a process has parts of weights, and so makes no pass without the others."""
        return max(self.shard, self.expert, self.tensor, self.pipeline) > 1

    @property
    def is_exact(self) -> bool:
        """Whether the number of processes changes nothing."""
        return isinstance(self.reduction, ExactConfig)

    @property
    def parts(self) -> int:
        """Into how many parts the rows of a batch are divided."""
        exact = self.reduction
        return exact.logical_shards if isinstance(exact, ExactConfig) else self.replicas

    @property
    def replicas(self) -> int:
        """Processes, or teams of them, among which the rows of a batch are divided."""
        return self.data * self.shard

    @property
    def team(self) -> int:
        """Processes of one stage that have the same rows."""
        return self.context * self.tensor

    @property
    def weight_parts(self) -> int:
        """Into how many parts weights, gradients and optimizer are divided."""
        return self.shard * self.context if self.shard > 1 else 1

    def adds_by_exchange(self, device_type: str) -> bool:
        """Whether gradients that FSDP divides travel as they are, and become float32 on arrival."""
        return self.is_exact or (device_type == "cpu" and self.data == 1)

    @property
    def processes(self) -> int:
        """How many there are."""
        return self.replicas * self.team * self.pipeline

    def micro_batches(self, batch_size: int, size: int | None = None) -> MicroBatches:
        """How the rows of a batch pass.

        Args:
            batch_size: rows of the batch of all processes.
            size: rows at once; None: as many as there are, but for a pipeline.
        """
        rows = -(-batch_size // self.parts)
        if size is None:
            size = rows if self.pipeline == 1 else rows // (MICRO_BATCHES * self.pipeline)
        return MicroBatches(rows, max(1, min(rows, size)), -(-self.parts // self.replicas))

    def coordinates(self, rank: int) -> Coordinates:
        """The place of a process: those that divide layers are neighbours."""
        outer, tensor = divmod(rank, self.tensor)
        outer, context = divmod(outer, self.context)
        outer, shard = divmod(outer, self.shard)
        pipeline, data = divmod(outer, self.data)
        return Coordinates(pipeline, data, shard, context, tensor)

    def rank(self, at: Coordinates) -> int:
        """The number of the process at a place."""
        outer = (at.pipeline * self.data + at.data) * self.shard + at.shard
        return (outer * self.context + at.context) * self.tensor + at.tensor

    def replica(self, rank: int) -> int:
        """Which share of the rows a process has, from 0."""
        at = self.coordinates(rank)
        return at.data * self.shard + at.shard

    def on(self, processes: int) -> Self:
        """The same division with as much `data` as makes so many processes.

        Raises:
            ConfigError: there is none.
        """
        rest = self.processes // self.data
        if processes % rest:
            named = self._times("shard", "context", "tensor", "pipeline")
            if processes == 1:
                raise ConfigError(f"{named} needs several processes, and this is one; give 1")
            verb = "do" if " times " in named else "does"
            raise ConfigError(
                f"{named} {verb} not divide {processes} processes; choose divisors, or 1"
            )
        return self.replace(data=processes // rest)

    @model_validator(mode="after")
    def _a_part_for_each(self) -> Self:
        for name, what in NOT_EXACT.items():
            if self.is_exact and (ways := getattr(self, name)) > 1:
                raise ConfigError(
                    f"{name}={ways} divides {what}, of which reduction=exact adds up whole ones; "
                    "leave one of the two out"
                )
        if self.replicas % self.expert:
            raise ConfigError(
                f"expert={self.expert} does not divide {self._of_rows}; choose a divisor"
            )
        if self.parts < self.replicas:
            raise ConfigError(
                f"reduction.logical_shards={self.parts} is less than {self._of_rows}, so that "
                "some processes have none; choose at least that"
            )
        if self.shard > 1 and self.parts % self.replicas:
            raise ConfigError(
                f"{self._of_rows} does not divide reduction.logical_shards={self.parts}: processes "
                "that divide weights compute in step; choose a multiple"
            )
        return self

    def _times(self, *names: str) -> str:
        """The keys above 1 as a product, such as `data=2 times shard=4`; else the first."""
        several = [name for name in names if self.ways[name] > 1] or names[:1]
        return " times ".join(f"{name}={self.ways[name]}" for name in several)

    @property
    def _of_rows(self) -> str:
        return self._times("data", "shard")

    def check_batch(self, rows: int, seq_len: int) -> None:
        """Refuse a batch that cannot be divided.

        Args:
            rows: of the batch.
            seq_len: tokens of each.

        Raises:
            ConfigError: it has fewer rows than parts; or parts of several sizes, where processes
                that divide weights compute in step; or the sequences cannot be divided.
        """
        if seq_len % self.team:
            raise ConfigError(
                f"{self._times('context', 'tensor')} does not divide train.seq_len={seq_len}; "
                "choose a divisor"
            )
        name = f"reduction.logical_shards={self.parts}" if self.is_exact else self._of_rows
        if self.parts > rows:
            raise ConfigError(
                f"{name} is more than train.batch_size={rows}, so that some have no row; choose at "
                f"most that, or train.batch_size={self.parts} or more"
            )
        if self.in_step and rows % self.parts:
            raise ConfigError(
                f"{name} does not divide train.batch_size={rows}: processes that divide weights "
                "compute in step; choose a divisor"
            )


UNDIVIDED = ParallelismConfig()
"""One process, which adds up as it goes."""

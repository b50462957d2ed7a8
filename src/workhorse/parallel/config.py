"""The section `parallel` of a recipe: degrees of parallelism, and the order of gradient sums."""

from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from workhorse.config.base import Config, ConfigError, OnResume

Ways = Annotated[int, Field(ge=1)]
DIVIDED = ("data", "shard", "context", "tensor", "pipeline", "expert")
"""The recipe keys that set a degree of parallelism, one key for each kind of parallelism."""
NOT_EXACT = {
    "context": "sequences",
    "expert": "experts",
    "tensor": "layers",
    "pipeline": "layers",
}
"""Recipe keys that are not supported with `reduction: exact`, with the objects that they divide."""
LONGEST_PATIENCE = 1800.0
"""Maximum of `patience`, in seconds. After this time PyTorch's gloo backend times out by itself,
without a stack trace."""
MICRO_BATCHES = 4
"""Default number of micro-batches per pipeline stage, used if no `micro_batch_size` is given. The
pipeline bubble is then less than a fifth of the time."""


def share_of(whole: int, ways: int, number: int) -> range:
    """Divide `range(whole)` into `ways` consecutive, nearly equal parts; return part `number`."""
    return range(number * whole // ways, (number + 1) * whole // ways)


class FastConfig(Config):
    """Sum gradients in the order that the communication backend chooses.

    The rounding of the sums depends on the number of processes.
    """

    kind: Literal["fast"] = "fast"


class ExactConfig(Config):
    """Sum gradients in a fixed binary tree.

    Loss and weights are bitwise identical on any number of processes, including one.
    """

    kind: Literal["exact"] = "exact"
    logical_shards: Ways = 8
    """Number of parts that a batch is divided into, at least the number of processes. Each part is
    computed in micro-batches of `micro_batch_size` rows, and the gradients of the parts are summed.
    Results depend on this number instead of the number of processes."""


class MicroBatches(NamedTuple):
    """The micro-batches of one process, or of a group of processes that compute the same rows.

    A batch is divided into parts (`ParallelismConfig.parts`), and each part into micro-batches.
    """

    rows: int
    """Number of rows in the batch's largest part."""
    size: int
    """Number of rows in a micro-batch."""
    parts: int
    """Number of parts of a batch that each process computes."""

    @property
    def passes(self) -> int:
        """Number of micro-batches in each part of a batch."""
        return -(-self.rows // self.size)

    @property
    def count(self) -> int:
        """Number of micro-batches that each process computes per step."""
        return self.parts * self.passes


class Coordinates(NamedTuple):
    """The coordinates of a rank in the device mesh, from 0; the last axis varies fastest."""

    pipeline: int
    data: int
    shard: int
    context: int
    tensor: int


class ParallelismConfig(Config):
    """Division of the work of a step among processes.

    The batch size counts the rows of all processes.
    """

    data: Annotated[Ways, OnResume.ROUNDED] = 1
    """Number of replicas: processes that each hold the whole model and compute a share of the rows
    of every batch. `workhorse train --workers N` starts N replicas on this machine; with `torchrun`
    it is the number of processes. With an exact `reduction` it does not change the results."""
    shard: Annotated[Ways, OnResume.ROUNDED] = 1
    """Number of processes that shard weights, gradients and optimizer state (FSDP; ZeRO stage 3,
    1910.02054). They also divide the rows of every batch. With `data` above 1, there are `data`
    copies of the sharded model."""
    context: Annotated[Ways, OnResume.ROUNDED] = 1
    """Number of processes that split each sequence into consecutive chunks. A process gets the keys
    and values of earlier chunks from the other processes (2407.21783 §3.3.2). With `shard` above 1,
    these processes also shard the weights."""
    tensor: Annotated[Ways, OnResume.ROUNDED] = 1
    """Number of processes that split every layer. Each has some heads, hidden features and tokens
    of the vocabulary (1909.08053), and between layers some tokens of each sequence
    (2205.05198 §4.2.2). They communicate most, so they get neighbouring ranks."""
    pipeline: Annotated[Ways, OnResume.ROUNDED] = 1
    """Number of pipeline stages of consecutive layers (1811.06965). Stages alternate one forward
    and one backward pass of micro-batches (1F1B, 2104.04473 §2.2.1). Without a `micro_batch_size`
    there are at least four micro-batches per stage, if there are enough rows. Stages communicate
    least, so their ranks are farthest apart."""
    expert: Annotated[Ways, OnResume.ROUNDED] = 1
    """Number of processes that divide the routed experts of every mixture of experts and exchange
    tokens (2006.16668 §3); a divisor of `data` × `shard`. With `expert` above 1, `shard` does not
    divide the experts further."""
    reshard: Annotated[Literal["pass", "step"], OnResume.NO_EFFECT] = "pass"
    """When the processes of `shard` free gathered weights. `pass`: after each pass of a layer, so
    that only one or two layers are gathered at a time. `step`: at the end of the step, so that
    weights are gathered only once per step, but stay unsharded in memory until its end. With `step`
    and an exact `reduction`, gradients stay unsharded too and are exchanged once."""
    reduction: Annotated[
        FastConfig | ExactConfig, Field(discriminator="kind"), OnResume.ROUNDED
    ] = FastConfig()
    """The order in which gradients are summed."""
    patience: Annotated[float, OnResume.NO_EFFECT] = Field(
        default=LONGEST_PATIENCE, ge=1, le=LONGEST_PATIENCE
    )
    """Maximum seconds without a completed step (with its validation and save) in a run of several
    processes. After that, each process prints its stack traces and exits, because one hangs and the
    others would wait for it."""

    @property
    def ways(self) -> dict[str, int]:
        """The degree of parallelism for each key of `DIVIDED`, by key."""
        return {name: getattr(self, name) for name in DIVIDED}

    @property
    def lockstep(self) -> bool:
        """True if ranks divide weights.

        Each pass then needs all ranks, so all must run equal numbers of passes.
        """
        return max(self.shard, self.expert, self.tensor, self.pipeline) > 1

    @property
    def is_exact(self) -> bool:
        """True for `reduction: exact`: results do not depend on the number of processes."""
        return isinstance(self.reduction, ExactConfig)

    @property
    def parts(self) -> int:
        """Number of parts of a batch: `replicas`, or `logical_shards` for an exact reduction."""
        exact = self.reduction
        return exact.logical_shards if isinstance(exact, ExactConfig) else self.replicas

    @property
    def replicas(self) -> int:
        """Number of processes, or groups of processes, that each compute different rows."""
        return self.data * self.shard

    @property
    def team(self) -> int:
        """Number of processes of one pipeline stage that compute the same rows of a batch."""
        return self.context * self.tensor

    @property
    def weight_parts(self) -> int:
        """Number of FSDP shards of weights, gradients and optimizer state; 1 without FSDP."""
        return self.shard * self.context if self.shard > 1 else 1

    def adds_by_exchange(self, device_type: str) -> bool:
        """True if FSDP exchanges gradients in their own dtype and receivers sum in float32.

        False if FSDP uses the backend's reduce-scatter.
        """
        return self.is_exact or (device_type == "cpu" and self.data == 1)

    @property
    def processes(self) -> int:
        """Total number of processes of the run."""
        return self.replicas * self.team * self.pipeline

    def micro_batches(self, batch_size: int, size: int | None = None) -> MicroBatches:
        """Divide the rows of a batch into micro-batches.

        Args:
            batch_size: number of rows in the batch of all processes.
            size: maximum rows per micro-batch. None: all rows of a part; with pipeline stages, a
                size that gives enough micro-batches to fill the pipeline.
        """
        rows = -(-batch_size // self.parts)
        if size is None:
            size = rows if self.pipeline == 1 else rows // (MICRO_BATCHES * self.pipeline)
        return MicroBatches(rows, max(1, min(rows, size)), -(-self.parts // self.replicas))

    def coordinates(self, rank: int) -> Coordinates:
        """The mesh coordinates of a rank. Ranks of a tensor-parallel group are neighbours."""
        outer, tensor = divmod(rank, self.tensor)
        outer, context = divmod(outer, self.context)
        outer, shard = divmod(outer, self.shard)
        pipeline, data = divmod(outer, self.data)
        return Coordinates(pipeline, data, shard, context, tensor)

    def rank(self, at: Coordinates) -> int:
        """Return the rank at the mesh coordinates `at`; the inverse of `coordinates`."""
        outer = (at.pipeline * self.data + at.data) * self.shard + at.shard
        return (outer * self.context + at.context) * self.tensor + at.tensor

    def replica(self, rank: int) -> int:
        """Index, from 0, of the replica of a rank. Ranks of one replica compute the same rows."""
        at = self.coordinates(rank)
        return at.data * self.shard + at.shard

    def on(self, processes: int) -> Self:
        """Return a copy for a run of `processes` processes; only `data` is changed.

        Raises:
            ConfigError: `processes` is not divisible by the product of the other keys.
        """
        rest = self.processes // self.data
        if processes % rest:
            named = self._times("shard", "context", "tensor", "pipeline")
            if processes == 1:
                raise ConfigError(f"{named} needs several processes, but the run has one; use 1")
            verb = "do" if " times " in named else "does"
            raise ConfigError(
                f"{named} {verb} not divide {processes} processes; choose divisors of {processes}"
            )
        return self.replace(data=processes // rest)

    @model_validator(mode="after")
    def _a_part_for_each(self) -> Self:
        for name, what in NOT_EXACT.items():
            if self.is_exact and (ways := getattr(self, name)) > 1:
                raise ConfigError(
                    f"{name}={ways} is not supported with reduction=exact, which needs undivided "
                    f"{what}; remove one of the two"
                )
        if self.replicas % self.expert:
            raise ConfigError(
                f"expert={self.expert} does not divide {self._of_rows}; choose a divisor"
            )
        if self.parts < self.replicas:
            raise ConfigError(
                f"reduction.logical_shards={self.parts} is less than {self._of_rows}, but each "
                f"process needs a logical shard; choose at least {self.replicas}"
            )
        if self.shard > 1 and self.parts % self.replicas:
            raise ConfigError(
                f"{self._of_rows} does not divide reduction.logical_shards={self.parts}, but "
                "processes that shard weights need equal numbers of logical shards; choose a "
                f"multiple of {self.replicas}"
            )
        return self

    def _times(self, *names: str) -> str:
        """Format the keys above 1 as a product, for messages: `data=2 times shard=4`.

        If no key is above 1, only the first key is used.
        """
        several = [name for name in names if self.ways[name] > 1] or names[:1]
        return " times ".join(f"{name}={self.ways[name]}" for name in several)

    @property
    def _of_rows(self) -> str:
        return self._times("data", "shard")

    def check_batch(self, rows: int, seq_len: int) -> None:
        """Raise an error if a batch cannot be divided among the processes.

        Args:
            rows: number of rows in the batch.
            seq_len: number of tokens per row.

        Raises:
            ConfigError: there are fewer rows than parts, the sequences cannot be divided, or parts
                differ in size although ranks run in lockstep.
        """
        if seq_len % self.team:
            raise ConfigError(
                f"{self._times('context', 'tensor')} does not divide train.seq_len={seq_len}; "
                "choose a divisor"
            )
        name = f"reduction.logical_shards={self.parts}" if self.is_exact else self._of_rows
        if self.parts > rows:
            raise ConfigError(
                f"{name} is more than train.batch_size={rows}, but each part needs a row; choose "
                f"at most {rows}, or set train.batch_size={self.parts} or more"
            )
        if self.lockstep and rows % self.parts:
            raise ConfigError(
                f"{name} does not divide train.batch_size={rows}, but processes that divide "
                f"weights need equal numbers of rows; choose a divisor of {rows}"
            )


UNDIVIDED = ParallelismConfig()
"""Settings of a single process, without parallelism."""

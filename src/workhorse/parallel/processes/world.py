"""The processes that train one model: which of them this is, and what they tell each other.

`torchrun`, or `workhorse train --workers`, starts them and says in the environment how many there
are. A process that was started by itself is a world of one, in which nothing is sent.
"""

import gc
import time
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from workhorse.errors import WorkhorseError
from workhorse.parallel.config import ParallelismConfig
from workhorse.parallel.processes import environment
from workhorse.parallel.processes.meeting import meet

PATIENCE = timedelta(minutes=30)
"""How long a process waits for the others: the first one may be saving, or reading its text."""
REFUSED = "refused"
"""In the store: how many processes are."""
TELLING = 2.0
"""Seconds that one process has to say what all of them refuse, before the others end."""


class LostError(WorkhorseError):
    """Another process has gone."""


class ToldError(LostError):
    """Another process says what is wrong."""


class World:
    """The processes of a run.

    Args:
        rank: the number of this one, from 0.
        size: how many there are.
        parallel: how they divide what they do; None: each has rows of its own.
        group: exchanges what they tell each other; None for PyTorch's default.

    Attributes:
        in_step: whether a pass of one needs one of every other at the same time, since each has a
            part of the weights.
        team: so many consecutive processes have the same rows of a batch.
        teams: how many of them there are, with different rows; each stage of a pipeline has as many
            again.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        parallel: ParallelismConfig | None = None,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank, self.size, self.group = rank, size, group
        self.parallel = parallel = parallel or ParallelismConfig(data=size)
        self.in_step, self.team = parallel.in_step, parallel.team
        self.teams = size // (parallel.team * parallel.pipeline)

    @property
    def member(self) -> int:
        """The number of this process among those that have the same rows, from 0."""
        at, parallel = self.parallel.coordinates(self.rank), self.parallel
        return (at.pipeline * parallel.context + at.context) * parallel.tensor + at.tensor

    def team_of(self, rank: int) -> int:
        """The number of a process's team among those of its stage, which have different rows."""
        at = self.parallel.coordinates(rank)
        return at.data * self.parallel.shard + at.shard

    def apart(self) -> "World":
        """The same processes for another thread of each; all must call it."""
        if self.size == 1:
            return self
        group = dist.new_group(timeout=PATIENCE, backend="gloo")
        assert isinstance(group, dist.ProcessGroup)  # this process belongs to it
        return World(self.rank, self.size, self.parallel, group=group)

    def alike(self, key: Callable[[int], Hashable]) -> "World":
        """Of a run's processes, those whose number has the same key as this one's.

        All must call it, in the same order of calls.
        """
        groups: dict[Hashable, list[int]] = {}
        for rank in range(self.size):
            groups.setdefault(key(rank), []).append(rank)
        own = groups[key(self.rank)]
        if len(own) == self.size:
            return self
        own_group: dist.ProcessGroup | None = None
        for ranks in groups.values():
            if len(ranks) > 1:  # every process makes all groups
                group = dist.new_group(ranks, timeout=PATIENCE)
                if ranks is own:
                    assert isinstance(group, dist.ProcessGroup)
                    own_group = group
        return World(own.index(self.rank), len(own), group=own_group)

    @property
    def is_first(self) -> bool:
        """Whether this process writes what the run writes."""
        return self.rank == 0

    def share(self, count: int, rank: int | None = None) -> range:
        """Which of so many things are this process's team's, or another's: consecutive ones."""
        team = self.team_of(self.rank if rank is None else rank)
        return range(team * count // self.teams, (team + 1) * count // self.teams)

    def passes(self, count: int) -> Iterator[tuple[int, bool]]:
        """Which of so many things this process passes, and whether they are its to count.

        In step, all processes do as many, so that some pass one that another has too.
        """
        share = self.share(count)
        yield from ((number, True) for number in share)
        if self.in_step and len(share) < -(-count // self.teams):
            yield 0, False

    def largest(self, number: int) -> int:
        """The largest of the numbers that the processes give."""
        if self.size == 1:
            return number
        tensor = torch.tensor(number)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return int(tensor)

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all processes, of one shape, stacked in the order of their numbers."""
        if self.size == 1:
            return tensor[None]
        gathered = tensor.new_empty(self.size, *tensor.shape)
        dist.all_gather(list(gathered), tensor, group=self.group)
        return gathered

    def wait(self) -> None:
        """Wait until all others wait too."""
        self.largest(0)

    @contextmanager
    def first_before_others(self) -> Generator[None]:
        """Let the first process do what stands inside, then all others, who find it done."""
        if not self.is_first:
            self.wait()
        yield
        if self.is_first:
            self.wait()

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Add up tensors over the processes, in place, in the backend's order.

        Whole numbers, and numbers that all other processes have as 0, come out the same in any.
        """
        if self.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor, group=self.group)


ALONE = World()
"""A process that trains by itself."""


@contextmanager
def open_world() -> Generator[World]:
    """Join the processes that the environment tells of; none: a world of one.

    What several of them refuse is told by the one that finds it first.

    Raises:
        WorkhorseError: the environment is incomplete, or the others do not come.
        LostError: one of them has gone.
        ToldError: one of them says why it ends.
    """
    size = environment.count()
    if size == 1:
        yield ALONE
        return
    from torch.distributed.rendezvous import rendezvous

    try:
        store, rank, _ = next(rendezvous("env://", timeout=PATIENCE))
        own = meet(store, rank, size, PATIENCE)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=PATIENCE)
    except (ValueError, RuntimeError) as error:
        raise WorkhorseError(
            f"WORLD_SIZE is {size}, and the other processes are not to be found ({error}); start "
            "all by torchrun, and give each its network interface as GLOO_SOCKET_IFNAME if the "
            "machine has several; or unset it"
        ) from error
    try:
        yield World(dist.get_rank(), dist.get_world_size())
    except RuntimeError as error:
        if not _is_loss(error):
            raise
        kind = ToldError if _is_told(own) else LostError
        raise kind(
            "another process of the run has gone, or does not answer; its own message says why"
        ) from error
    except WorkhorseError as error:
        if _tells(own):
            raise
        time.sleep(TELLING)  # when one has gone, an agent ends all
        raise ToldError("another process of the run was refused first; it says why") from error
    finally:
        dist.destroy_process_group()
        gc.collect()  # groups that the run's objects still hold end now, and not with Python


def _tells(store: Store) -> bool:
    """Whether this process is the first to be refused, as far as the store can be reached."""
    try:
        return store.add(REFUSED, 1) == 1
    except RuntimeError:
        return True


def _is_told(store: Store) -> bool:
    """Whether a process says why it ends, as far as the store can be reached."""
    try:
        return store.check([REFUSED])
    except RuntimeError:
        return False


def _is_loss(error: RuntimeError) -> bool:
    """Whether a backend failed to reach another process; gloo says so in words alone."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)

"""The processes that train one model: which of them this is, and what they tell each other.

`torchrun`, or `workhorse train --workers`, starts them and says in the environment how many there
are. A process that was started by itself is a world of one, in which nothing is sent.
"""

import gc
import time
from collections.abc import Callable, Generator, Hashable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from workhorse.errors import WorkhorseError
from workhorse.parallel.config import (
    LONGEST_PATIENCE,
    UNDIVIDED,
    ParallelismConfig,
    share_of,
)
from workhorse.parallel.processes import environment
from workhorse.parallel.processes.group import Group
from workhorse.parallel.processes.meeting import meet

PATIENCE = timedelta(seconds=LONGEST_PATIENCE)
"""How long a process waits for the others: the first one may be saving, or reading its text."""
REFUSED = "refused"
"""Key in the store: how many processes have refused to run."""
REFUSAL_GRACE = 2.0
"""Seconds that the first process to refuse has to print why, before the others end."""


class LostError(WorkhorseError):
    """Another process of the run exited or stopped responding."""


class ToldError(LostError):
    """Another process of the run exited or stopped responding, and has said why."""


class World(Group):
    """The processes of a run; the first writes what the run writes.

    Args:
        rank: the number of this one, from 0.
        size: how many there are.
        parallel: how they divide what they do.
        process_group: takes what they send each other; None for PyTorch's default.

    Attributes:
        in_step: whether a pass of one needs one of every other at the same time, since each has a
            part of the weights.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        parallel: ParallelismConfig,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(rank, size, process_group)
        self.parallel = parallel
        self.in_step = parallel.in_step

    @property
    def replicas(self) -> int:
        """Into how many shares the rows of a batch are divided."""
        return self.parallel.replicas

    @property
    def member(self) -> int:
        """The number of this process among those that have the same rows, from 0."""
        at, parallel = self.parallel.coordinates(self.rank), self.parallel
        return (at.pipeline * parallel.context + at.context) * parallel.tensor + at.tensor

    def apart(self) -> "World":
        """The same processes for another thread of each; all must call it."""
        if self.size == 1:
            return self
        own = dist.new_group(timeout=PATIENCE, backend="gloo")
        assert isinstance(own, dist.ProcessGroup)  # this process belongs to it
        return World(self.rank, self.size, self.parallel, process_group=own)

    def alike(self, key: Callable[[int], Hashable]) -> Group:
        """Of a run's processes, those whose number has the same key as this one's.

        All must call it, in the same order of calls.
        """
        groups: dict[Hashable, list[int]] = {}
        for rank in range(self.size):
            groups.setdefault(key(rank), []).append(rank)
        own = groups[key(self.rank)]
        if len(own) == self.size:
            return self
        of_own: dist.ProcessGroup | None = None
        for ranks in groups.values():
            if len(ranks) > 1:  # every process makes all groups
                made = dist.new_group(ranks, timeout=PATIENCE)
                if ranks is own:
                    assert isinstance(made, dist.ProcessGroup)
                    of_own = made
        return Group(own.index(self.rank), len(own), of_own)

    def share(self, count: int, rank: int | None = None) -> range:
        """The consecutive ones of so many things that a process's replica has.

        Args:
            count: of them.
            rank: of the process; None: this one.
        """
        replica = self.parallel.replica(self.rank if rank is None else rank)
        return share_of(count, self.replicas, replica)

    def passes(self, count: int) -> Iterator[tuple[int, bool]]:
        """Which of so many things this process passes, and whether they are its to count.

        In step, all processes do as many, so that some pass one that another has too.
        """
        share = self.share(count)
        yield from ((number, True) for number in share)
        if self.in_step and len(share) < -(-count // self.replicas):
            yield 0, False


ALONE = World(0, 1, UNDIVIDED)
"""A process that trains by itself."""


@contextmanager
def join_processes() -> Generator[Group]:
    """Join the processes that the environment tells of; none: this one is alone.

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

    environment.end_with_agent()
    environment.check_address()
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
        yield Group(dist.get_rank(), dist.get_world_size())
    except RuntimeError as error:
        if not _is_loss(error):
            raise
        kind = ToldError if _is_told(own) else LostError
        raise kind(
            "another process of the run has gone, or does not answer; its message or the last line "
            "says why"
        ) from error
    except WorkhorseError as error:
        if _tells(own):
            raise
        time.sleep(REFUSAL_GRACE)  # when one has gone, an agent ends all
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

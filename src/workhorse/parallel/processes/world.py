"""The processes that train one model: their rendezvous in a store, and the division of work.

`torchrun` or `workhorse train --workers` starts the processes and sets their number in the
environment. A process that was started by itself is a world of size 1 and does not communicate.

PyTorch's elastic agent keeps its store when it restarts workers, so the store may contain entries
of earlier attempts. The number of restarts cannot identify an attempt, because on several machines
only one agent counts restarts.
"""

import gc
import time
import uuid
from collections.abc import Callable, Generator, Hashable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from workhorse.errors import WorkhorseError
from workhorse.parallel.config import (
    LONGEST_PATIENCE,
    UNDIVIDED,
    ParallelismConfig,
    share_of,
)
from workhorse.parallel.processes import environment
from workhorse.parallel.processes.group import Group

LOOKS, PAUSE = 20, 0.05
"""Number of polls for rank 0's answer until its prefix is read again, and seconds between polls."""


def meet(store: Store, rank: int, size: int, patience: timedelta) -> Store:
    """Return a store that only the processes of this attempt use; all of them must call it.

    It is `store` with a key prefix. Rank 0 chooses a new prefix and answers each of the other
    ranks. A rank that reads the prefix of an earlier attempt gets no answer and reads again.

    Raises:
        RuntimeError: the other processes do not arrive in time.
    """
    own = uuid.uuid4().hex
    if rank == 0:
        store.set("first", own)
        for other in range(1, size):
            store.wait([f"{own}/{other}"], patience)
            guest = store.get(f"{own}/{other}").decode()
            store.set(f"{own}/{other}/{guest}", "")
        return PrefixStore(own, store)
    until = time.monotonic() + patience.total_seconds()
    while time.monotonic() < until:
        first = store.get("first").decode()
        store.set(f"{first}/{rank}", own)
        for _ in range(LOOKS):
            if store.check([f"{first}/{rank}/{own}"]):
                return PrefixStore(first, store)
            time.sleep(PAUSE)
    raise RuntimeError(f"rank 0 of {size} processes does not respond")


PATIENCE = timedelta(seconds=LONGEST_PATIENCE)
"""Timeout of collectives. It is long: rank 0 may be saving a checkpoint or reading its corpus."""
REFUSED = "refused"
"""Store key of the number of processes that raised a WorkhorseError."""
REFUSAL_GRACE = 2.0
"""Seconds that the first failing process has to print its error, before the others exit."""


class LostError(WorkhorseError):
    """Another process of the run exited or stopped responding."""


class ReportedError(LostError):
    """Another process of the run exited after it reported an error."""


class World(Group):
    """All processes of a run; rank 0 writes the run's files.

    Args:
        rank: the rank of this process.
        size: number of processes.
        parallel: the parallelism settings.
        process_group: PyTorch's process group; None for the default group.

    Attributes:
        lockstep: True if all ranks must run equal numbers of passes together, because each has a
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
        self.lockstep = parallel.lockstep

    @property
    def replicas(self) -> int:
        """Number of shares that the rows of a batch are divided into."""
        return self.parallel.replicas

    @property
    def member(self) -> int:
        """Index, from 0, of this process among the processes that compute the same rows."""
        at, parallel = self.parallel.coordinates(self.rank), self.parallel
        return (at.pipeline * parallel.context + at.context) * parallel.tensor + at.tensor

    def apart(self) -> "World":
        """Create a second group of the same processes, for another thread; all must call it."""
        if self.size == 1:
            return self
        own = dist.new_group(timeout=PATIENCE, backend="gloo")
        assert isinstance(own, dist.ProcessGroup)  # this process belongs to it
        return World(self.rank, self.size, self.parallel, process_group=own)

    def alike(self, key: Callable[[int], Hashable]) -> Group:
        """Create the group of all ranks for which `key` returns the same value as for this rank.

        All ranks of the run must call it, in the same order.
        """
        groups: dict[Hashable, list[int]] = {}
        for rank in range(self.size):
            groups.setdefault(key(rank), []).append(rank)
        own = groups[key(self.rank)]
        if len(own) == self.size:
            return self
        of_own: dist.ProcessGroup | None = None
        for ranks in groups.values():
            if len(ranks) > 1:  # PyTorch requires every process to create all groups
                made = dist.new_group(ranks, timeout=PATIENCE)
                if ranks is own:
                    assert isinstance(made, dist.ProcessGroup)
                    of_own = made
        return Group(own.index(self.rank), len(own), of_own)

    def share(self, count: int, rank: int | None = None) -> range:
        """Return the slice of `range(count)` that the replica of a rank processes.

        Args:
            count: number of items.
            rank: the rank; None: this rank.
        """
        replica = self.parallel.replica(self.rank if rank is None else rank)
        return share_of(count, self.replicas, replica)

    def passes(self, count: int) -> Iterator[tuple[int, bool]]:
        """Yield the index of each item that this rank processes, and True if the result counts.

        Ranks in lockstep must run equal numbers of passes. A rank with fewer items therefore also
        processes item 0, and its result does not count.
        """
        share = self.share(count)
        yield from ((number, True) for number in share)
        if self.lockstep and len(share) < -(-count // self.replicas):
            yield 0, False


ALONE = World(0, 1, UNDIVIDED)
"""The world of a single process."""


@contextmanager
def join_processes() -> Generator[Group]:
    """Join the processes that the environment describes; by default a single process.

    If several processes raise a WorkhorseError, only the first one reports it.

    Raises:
        WorkhorseError: the environment is incomplete, or the other processes cannot be reached.
        LostError: another process exited or stopped responding.
        ReportedError: another process exited after it reported an error.
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
            f"WORLD_SIZE={size} in the environment, but the other processes cannot be reached "
            f"({error}); start all with torchrun, and set GLOO_SOCKET_IFNAME if a machine has "
            "several network interfaces; or unset WORLD_SIZE"
        ) from error
    try:
        yield Group(dist.get_rank(), dist.get_world_size())
    except RuntimeError as error:
        if not _is_loss(error):
            raise
        kind = ReportedError if _is_told(own) else LostError
        raise kind(
            "another process of the run exited or stopped responding; see its error message or the "
            "last line of the output"
        ) from error
    except WorkhorseError as error:
        if _tells(own):
            raise
        time.sleep(REFUSAL_GRACE)  # the agent ends all processes as soon as one exits
        raise ReportedError(
            "another process of the run failed first; see its error message"
        ) from error
    finally:
        dist.destroy_process_group()
        gc.collect()  # destroys groups still held by the run's objects, before Python exits


def _tells(store: Store) -> bool:
    """Record a failure in the store; return True if this process must report the error.

    True for the first process that fails, and if the store cannot be reached.
    """
    try:
        return store.add(REFUSED, 1) == 1
    except RuntimeError:
        return True


def _is_told(store: Store) -> bool:
    """True if any process has reported an error; False if the store cannot be reached."""
    try:
        return store.check([REFUSED])
    except RuntimeError:
        return False


def _is_loss(error: RuntimeError) -> bool:
    """True if a backend failed to reach another process; gloo reports this only as text."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)

"""The rendezvous of processes that were started together, in a part of a store of their own.

PyTorch's elastic agent keeps its store when it restarts workers, and on several machines only one
agent counts restarts. The store may therefore contain entries of earlier attempts.
"""

import time
import uuid
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

LOOKS, PAUSE = 20, 0.05
"""Number of polls for an answer, and seconds between them, before reading rank 0's name again."""


def meet(store: Store, rank: int, size: int, patience: timedelta) -> Store:
    """A private part of a store for these processes; all must call it.

    Rank 0 gives this part a new, unique prefix and answers each of the other ranks. A rank that
    reads the prefix of an earlier attempt gets no answer and reads again.

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

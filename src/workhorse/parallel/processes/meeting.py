"""Where processes that were started together meet: a part of a store that may outlive them.

PyTorch's elastic agent keeps its store when it starts workers again, and on several machines only
one agent counts that it did. So whoever looks for the others may find what those before them wrote.
"""

import time
import uuid
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

LOOKS, PAUSE = 20, 0.05
"""How often to look for an answer, and the seconds between, before asking for the first again."""


def meet(store: Store, rank: int, size: int, patience: timedelta) -> Store:
    """The part of a store that these processes use alone; all must call it.

    The first gives the part a new name and answers each of the others. One who finds an older name
    gets no answer, and looks again.

    Raises:
        RuntimeError: they do not come.
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
    raise RuntimeError(f"the first of {size} processes does not answer")

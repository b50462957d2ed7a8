"""Which documents of a source are held out: those whose hash is below a threshold.

The hash depends on the document alone, so adding or removing one moves no other. Only if the given
share would leave a split without documents does the threshold depend on them.
"""

import hashlib
from collections.abc import Iterable

HASHES = 2**64


def hash_of(identity: str) -> int:
    """A hash below `HASHES`, the same on every machine."""
    digest = hashlib.sha256(identity.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")


def threshold(fraction: float, documents: Iterable[tuple[str, Iterable[str]]]) -> float:
    """The hash below which documents are held out; of two or more, each split gets at least one.

    That is `fraction * HASHES` if it leaves documents in both splits. Otherwise only the document
    with the smallest hash is held out, or only that with the largest trains.

    Args:
        fraction: share of the documents; with 0 nothing is held out, and nothing is read.
        documents: the identity of each, and its text in blocks. They are read until both splits
            have one; documents without text do not count.
    """
    asked = fraction * HASHES
    smallest, largest = HASHES, -1
    for identity, blocks in documents if asked else ():
        number = hash_of(identity)
        if (number < smallest or number > largest) and any(blocks):
            smallest, largest = min(smallest, number), max(largest, number)
            if smallest < asked <= largest:
                return asked
    if smallest >= largest:  # none, or one, which is on the side that its hash says
        return asked
    return smallest + 1 if smallest >= asked else largest

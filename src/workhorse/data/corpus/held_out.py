"""Which documents of a source are held out: those whose hash is below a threshold.

The hash is of the document alone, so a document added or removed moves no other. Only where the
share asked for would leave a split without a document does the threshold follow the documents.
"""

import hashlib
from collections.abc import Iterable

HASHES = 2**64


def hash_of(identity: str) -> int:
    """A number below `HASHES`, the same on every machine."""
    digest = hashlib.sha256(identity.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")


def threshold(fraction: float, documents: Iterable[tuple[str, Iterable[str]]]) -> float:
    """The hash below which documents are held out, such that of two or more each split gets one.

    That is `fraction * HASHES` where it holds out some and leaves some. Else the document with the
    smallest hash is held out alone, or that with the largest trains alone.

    Args:
        fraction: of the documents, asked for; with 0 nothing is held out, and nothing is read.
        documents: what identifies each, and its text in blocks. Read until both splits have one;
            documents without text count for nothing.
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

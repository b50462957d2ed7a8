"""Seeded permutations of any range, without storing them.

The order of rows must be a pure function of their numbers, for corpora of any size, on every
machine and version. A stored permutation would take eight bytes per row, and NumPy does not promise
the same random streams from version to version.
"""

import hashlib

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

SMALL = 256
FEISTEL_ROUNDS = 4


def derive(seed: int, *labels: str | int) -> int:
    """A 64-bit key for one purpose; the labels distinguish it from other purposes."""
    digest = hashlib.sha256("/".join(map(str, (seed, *labels))).encode()).digest()
    return int.from_bytes(digest[:8], "big")


def permute(indices: Indices, size: int, key: int) -> Indices:
    """Where a keyed permutation of `range(size)` sends each index.

    Up to `SMALL` indices are sorted by random numbers, which is exactly uniform, while a network of
    so few bits is not. Beyond that, a Feistel network permutes the next even power of two; an index
    sent past `size` walks along its cycle until it falls inside (Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002, section 4.2), in fewer than four steps on average.
    """
    if size <= SMALL:
        return np.argsort(random_numbers(np.arange(size), key), kind="stable")[indices]
    half_bits = ((size - 1).bit_length() + 1) // 2
    round_keys = random_numbers(np.arange(FEISTEL_ROUNDS), key)
    values = indices.astype(np.uint64)
    walking = np.ones(values.shape, dtype=bool)
    while walking.any():
        values[walking] = _feistel(values[walking], half_bits, round_keys)
        walking = values >= size
    return values.astype(np.int64)


def random_numbers(indices: Indices, key: int) -> Words:
    """One uniform 64-bit number per index."""
    return _mixed(indices.astype(np.uint64) + np.uint64(key))


def _feistel(values: Words, half_bits: int, round_keys: Words) -> Words:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    for round_key in round_keys:
        scrambled = _mixed(right + round_key)
        left, right = right, left ^ (scrambled & mask)
    return (left << bits) | right


def _mixed(values: Words) -> Words:
    """The finaliser of SplitMix64: every bit of the input reaches every bit of the output."""
    values = values ^ (values >> np.uint64(30))
    values = values * np.uint64(0xBF58476D1CE4E5B9)
    values = values ^ (values >> np.uint64(27))
    values = values * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))

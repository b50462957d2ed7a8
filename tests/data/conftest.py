"""A byte tokenizer, and token streams in memory."""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from workhorse.data import Split, TokenStream


class ByteTokenizer:
    """A tokenizer with the ids 0 to 255 for UTF-8 bytes, 256 for bos and 257 for eos."""

    vocab_size = 258
    bos_id: int | None = 256
    eos_id: int | None = 257

    def __init__(self, fingerprint: str = "bytes") -> None:
        self.fingerprint = hashlib.sha256(fingerprint.encode()).hexdigest()
        self.encoded_texts = 0

    def encode_batch(self, texts: Sequence[str], *, begins: bool = True) -> list[list[int]]:
        self.encoded_texts += len(texts)
        return [list(text.encode()) for text in texts]

    def count_unknown(self, ids: Sequence[int]) -> int:
        """Count eos too: GPT-2's unk is its eos, which ends documents and never comes from text."""
        return ids.count(257) + ids.count(ord("?"))

    def decode(self, ids: Sequence[int]) -> str:
        special = {256: b"<bos>", 257: b"<eos>"}
        return b"".join(special.get(i, bytes([i % 256])) for i in ids).decode("utf-8", "replace")


@pytest.fixture
def tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


@pytest.fixture(scope="session")  # hypothesis calls it many times
def make_split() -> Callable[..., Split]:
    """Return a function that makes a split in which each token shows its position.

    Each argument of the function is the list of document lengths of one source.
    """

    def make(*sources: Sequence[int], weights: Sequence[float] | None = None) -> Split:
        streams = []
        for index, lengths in enumerate(sources):
            ends = np.cumsum(lengths)
            tokens = np.arange(ends[-1], dtype=np.uint32) + 1_000_000 * index
            shards = np.array_split(tokens, 3)
            streams.append(TokenStream(f"source{index}", shards, ends))
        return Split("train", tuple(streams), tuple(weights or [1.0] * len(sources)))

    return make

"""Documents to tokens on every core, in order, with bounded memory.

The `tokenizers` library spreads a block of texts over its own threads; meanwhile another block is
read, or converted to arrays. The tokens and their order never depend on the number of threads.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np

from workhorse.data.config import DataConfig
from workhorse.data.corpus.documents import Document
from workhorse.data.shards.stream import TokenStream

if TYPE_CHECKING:
    from workhorse.tokenizers import Tokenizer

BLOCK_CHARS = 2 << 20
BLOCK_PIECES = 4096
"""Texts are encoded in blocks of at most this many characters or pieces."""

BLOCKS_AT_ONCE = 2

Stream = TypeVar("Stream")


class Encoded(NamedTuple, Generic[Stream]):
    """A document, or a piece of one, as tokens."""

    stream: Stream
    """The stream that it belongs to."""
    document: Document
    tokens: np.ndarray
    unknown: int
    """How many of them stand for characters outside the vocabulary."""


def encoded(
    documents: Iterable[tuple[Stream, Document]],
    tokenizer: "Tokenizer",
    *,
    bos: bool,
    eos: bool,
    dtype: str,
) -> Iterator[Encoded[Stream]]:
    """Each document, or piece of one, with its tokens as `dtype`.

    Args:
        documents: each with what it belongs to, which is passed on; read up to `BLOCKS_AT_ONCE`
            blocks ahead. A block may hold documents of several streams, so that no core waits at
            the end of one.
        tokenizer: its ids must fit into `dtype`.
        bos: begin each document with the tokenizer's bos token.
        eos: end each document with the tokenizer's eos token.
        dtype: an unsigned integer dtype of NumPy.
    """

    def encode(block: list[tuple[Stream, Document]]) -> list[Encoded[Stream]]:
        ids = tokenizer.encode_batch([document.text for _, document in block])
        found = []
        for (stream, document), tokens in zip(block, ids, strict=True):
            before = [tokenizer.bos_id] if bos and document.begins else []
            after = [tokenizer.eos_id] if eos and document.ends else []
            array = np.array([*before, *tokens, *after], dtype=dtype)
            found.append(Encoded(stream, document, array, tokenizer.count_unknown(tokens)))
        return found

    blocks = _blocks(documents)
    with ThreadPoolExecutor(BLOCKS_AT_ONCE, thread_name_prefix="encode") as pool:
        waiting: deque[Future[list[Encoded[Stream]]]] = deque()
        try:
            while True:
                for block in islice(blocks, BLOCKS_AT_ONCE - len(waiting)):
                    waiting.append(pool.submit(encode, block))
                if not waiting:
                    return
                yield from waiting.popleft().result()
        finally:
            for block in waiting:
                block.cancel()


def stream_of(
    name: str, documents: Iterable[Document], tokenizer: "Tokenizer", config: DataConfig
) -> TokenStream:
    """A few documents as a stream in memory, with the same tokens as in a prepared data set."""
    tokens, ends, size, unknown = [np.zeros(0, np.int64)], [], 0, 0
    pairs = ((name, document) for document in documents)
    for found in encoded(pairs, tokenizer, bos=config.bos, eos=config.eos, dtype="int64"):
        tokens.append(found.tokens)
        size += len(found.document.text.encode())
        unknown += found.unknown
        if found.document.ends:
            ends.append(sum(map(len, tokens)))
    return TokenStream(
        name, [np.concatenate(tokens)], np.array(ends, dtype=np.int64), size, unknown
    )


def _blocks(
    documents: Iterable[tuple[Stream, Document]],
) -> Iterator[list[tuple[Stream, Document]]]:
    block: list[tuple[Stream, Document]] = []
    characters = 0
    for stream, document in documents:
        block.append((stream, document))
        characters += len(document.text)
        if characters >= BLOCK_CHARS or len(block) >= BLOCK_PIECES:
            yield block
            block, characters = [], 0
    if block:
        yield block

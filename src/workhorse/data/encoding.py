"""Encodes documents as tokens in parallel, and collects them for a shard or a stream in memory.

The `tokenizers` library encodes a block of strings in its own threads. Meanwhile another block is
read or converted to arrays. The tokens and their order do not depend on the number of threads.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from workhorse.data.config import DataConfig
from workhorse.data.conversations import Example, encode_example
from workhorse.data.dataset import Shard, TokenStream
from workhorse.data.documents import Document
from workhorse.data.manifest import ShardConfig, write_array
from workhorse.errors import WorkhorseError

if TYPE_CHECKING:
    from workhorse.tokenizers import Tokenizer
    from workhorse.tokenizers.chat.learned import Learned

BLOCK_CHARS = 2 << 20


BLOCK_PIECES = 4096
"""Number of characters, or of document pieces, that are encoded together as a block."""


# Two: while the library encodes one block, the other is read or converted to arrays.
BLOCKS_AT_ONCE = 2


Stream = TypeVar("Stream")


class Encoded(NamedTuple, Generic[Stream]):
    """A document, or a piece of a document, with its tokens."""

    stream: Stream
    """The token stream that the document belongs to, such as (split, source)."""
    document: Document
    tokens: np.ndarray
    unknown: int
    """Number of tokens that stand for characters outside the vocabulary."""
    weights: np.ndarray | None = None
    """The loss weight of each token, float32; None if the document is not a conversation."""


def encoded(
    documents: Iterable[tuple[Stream, Document]],
    tokenizer: "Tokenizer",
    *,
    bos: bool,
    eos: bool,
    dtype: str,
) -> Iterator[Encoded[Stream]]:
    """Encode documents or document pieces in parallel, and yield them in their order.

    Args:
        documents: (stream, document) pairs, read up to `BLOCKS_AT_ONCE` blocks ahead. A block may
            have documents of several streams, so that no core is idle at the end of a stream.
        tokenizer: the tokenizer; its ids must fit into `dtype`.
        bos: True to begin each document with the tokenizer's bos token.
        eos: True to end each document with the tokenizer's eos token.
        dtype: the NumPy dtype of the tokens, an integer type.
    """
    chat = partial(encode_example, tokenizer=tokenizer, bos=bos, eos=eos)

    def encode(block: list[tuple[Stream, Document]]) -> list[Encoded[Stream]]:
        texts: dict[bool, list[str]] = {True: [], False: []}
        for _, document in block:
            texts[document.begins] += [document.text] if document.example is None else []
        ids = {one: iter(tokenizer.encode_batch(texts[one], begins=one)) for one in texts}
        found: list[Encoded[Stream]] = []
        for stream, document in block:
            if document.example is not None:
                one, (tokens, weights) = _encode_chat(document, document.example, chat)
                unknown, array = tokenizer.count_unknown(tokens), np.array(tokens, dtype=dtype)
                of_tokens = np.array(weights, dtype=np.float32)
                found.append(Encoded(stream, one, array, unknown, of_tokens))
                continue
            tokens = next(ids[document.begins])
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
    """Encode a few documents into a token stream in memory, without writing a data set."""
    buffer, size = TokenBuffer(), 0
    found = encoded(
        ((name, document) for document in documents),
        tokenizer,
        bos=config.bos,
        eos=config.eos,
        dtype="int64",
    )
    for piece in found:
        size += buffer.add(piece)
    group = getattr(config.sources.get(name), "group", 1)
    return TokenStream.of_shards(name, [buffer.shard()], size, buffer.n_unknown, group)


def _encode_chat(
    document: Document, example: Example, encode: Callable[[Example], "Learned"]
) -> tuple[Document, tuple[list[int], list[float]]]:
    """Encode a conversation, or set `error` if its record is skipped."""
    try:
        if not document.error:
            *_, learned = map(encode, (*(document.others or ()), example))
            return document, learned
    except WorkhorseError as error:
        document = replace(document, error=f"{document.name}: {error}")
        if document.others is None:
            raise WorkhorseError(document.error) from None
    return document, ([], [])


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


class TokenBuffer:
    """Collects the tokens of one shard until it is written.

    Attributes:
        skipped: names and errors of the records that are skipped.
    """

    def __init__(self) -> None:
        self.tokens: list[np.ndarray] = []
        self.weights: list[np.ndarray] = []
        self.values: list[float] = []
        self.ends: list[int] = []
        self.n_tokens = self.n_bytes = self.n_unknown = 0
        self.skipped: dict[str, str] = {}

    def add(self, piece: Encoded[Any]) -> int:
        """Add a document, or a piece of one, and return its number of UTF-8 bytes."""
        self.tokens.append(piece.tokens)
        if piece.document.error:
            self.skipped[piece.document.name] = piece.document.error
            return 0
        n_bytes = len(piece.document.text.encode())
        self.n_tokens += len(piece.tokens)
        self.n_bytes += n_bytes
        self.n_unknown += piece.unknown
        if piece.weights is not None:
            self.weights.append(piece.weights)
        example = piece.document.example
        if example is not None and example.value is not None:
            self.values.append(example.value)
        if piece.document.ends:
            self.ends.append(self.n_tokens)
        return n_bytes

    def shard(self) -> Shard:
        """Return the collected arrays."""
        return Shard(
            np.concatenate(self.tokens) if self.tokens else np.zeros(0, dtype=np.int64),
            np.array(self.ends, dtype=np.int64),
            np.concatenate(self.weights) if self.weights else None,
            np.array(self.values, dtype=np.float32) if self.values else None,
        )

    def write(self, folder: Path, name: str) -> ShardConfig:
        """Write the shard's files, and return its entry for the manifest."""
        sums = {
            f"{array}_sha256": write_array(folder / f"{name}.{array}.npy", values)
            for array, values in self.shard()._asdict().items()
            if values is not None
        }
        return ShardConfig(
            name=name,
            tokens=self.n_tokens,
            documents=len(self.ends),
            bytes=self.n_bytes,
            pieces=len(self.tokens),
            unknown=self.n_unknown,
            skipped=len(self.skipped),
            error=next(iter(self.skipped.values()), None),
            **sums,
        )

"""Loss, perplexity and bits per byte of a model, exact over whole documents."""

import lzma
import math
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from workhorse.data.documents import Document
from workhorse.errors import WorkhorseError
from workhorse.nn import IGNORE, Decoder, TokenLogprobs, evaluation_mode


@dataclass(frozen=True, slots=True)
class Window:
    """Inputs of one forward pass and their targets.

    The first `len(inputs) - len(targets)` inputs are only context for the others: their targets
    were predicted in the previous window.
    """

    inputs: Sequence[int]
    targets: Sequence[int]


def windows(chunks: Iterable[Sequence[int]], context: int, stride: int) -> Iterator[Window]:
    """Cut a document into windows. The first predicts `context` tokens, each later one `stride`.

    Args:
        chunks: the tokens of the document, a few at a time. The very first token is only context,
            all others are predicted.
        context: the maximum number of inputs of a window.
        stride: `context` for windows that do not overlap (the first prediction of each sees one
            token). With a smaller stride every later prediction sees at least
            `context - stride + 1` tokens, at `context / stride` times the cost.
    """
    held: list[int] = []  # tokens that a later window still needs
    predicted = 0  # number of tokens after held[0] that have been predicted
    for chunk in chunks:
        held += chunk
        begin = 0
        while len(held) - begin > context:
            end = begin + context
            yield Window(held[begin:end], held[begin + predicted + 1 : end + 1])
            begin, predicted = begin + stride, context - stride
        del held[:begin]
    if len(held) > predicted + 1:
        yield Window(held[:-1], held[predicted + 1 :])


class Batch(NamedTuple):
    """A batch of windows."""

    inputs: Tensor
    """int64 `(batch, seq)`, padded on the right."""
    targets: Tensor
    """int64 `(batch, seq)`, `IGNORE` where nothing is predicted."""
    lengths: Sequence[int]
    """Number of inputs of each window."""


def batches(pieces: Iterable[Window], batch_size: int, ahead: int = 64) -> Iterator[Batch]:
    """Group windows of about equal length into batches.

    Windows are sorted by length within `ahead` batches at a time, then padded on the right, which
    does not affect a causal model. Targets of padding and of context are `IGNORE`.
    """
    pieces = iter(pieces)
    while some := list(islice(pieces, batch_size * ahead)):
        some.sort(key=lambda window: len(window.inputs), reverse=True)
        for start in range(0, len(some), batch_size):
            yield _padded(some[start : start + batch_size])


def padded_positions(
    decoder: Decoder, lengths: Sequence[int], device: torch.device
) -> Tensor | None:
    """Return the positions of tokens in sequences padded on the right, with -1 for padding.

    Return None if positions are not needed: causal attention does not see the padding, so positions
    matter only if rotary embeddings depend on the length of a sequence.
    """
    longest = max(lengths)
    if longest == min(lengths) or longest <= decoder.config.steady_length():
        return None
    index = torch.arange(longest, device=device)
    return torch.where(index < torch.tensor(lengths, device=device)[:, None], index, -1)


def _padded(rows: Sequence[Window]) -> Batch:
    lengths = [len(window.inputs) for window in rows]
    inputs = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORE)
    for row, (window, length) in enumerate(zip(rows, lengths, strict=True)):
        inputs[row, :length] = torch.tensor(window.inputs)
        targets[row, length - len(window.targets) : length] = torch.tensor(window.targets)
    return Batch(inputs, targets, lengths)


_GZIP_FORMAT = 16 + zlib.MAX_WBITS  # zlib then writes a gzip header


def compressed_bits_per_byte(texts: Iterable[str]) -> dict[str, float]:
    """Compute the bits per byte of concatenated UTF-8 strings under `gzip -9` and `xz -9`.

    The strings are compressed as one stream in the given order, so a compressor can use earlier
    ones, within its window (32 KiB and 64 MiB).

    Returns:
        `{"gzip": ..., "xz": ...}`; zeros for empty input.
    """
    gzip = zlib.compressobj(9, zlib.DEFLATED, _GZIP_FORMAT)
    xz = lzma.LZMACompressor(preset=9)
    n_bytes, sizes = 0, {"gzip": 0, "xz": 0}
    for text in texts:
        data = text.encode()
        n_bytes += len(data)
        sizes["gzip"] += len(gzip.compress(data))
        sizes["xz"] += len(xz.compress(data))
    sizes["gzip"] += len(gzip.flush())
    sizes["xz"] += len(xz.flush())
    return {name: 8 * size / n_bytes if n_bytes else 0.0 for name, size in sizes.items()}


TOKENS_AT_ONCE = {"cpu": 2048, "cuda": 32768}
"""Number of tokens in a forward pass: few enough for a CPU's caches, enough for a GPU's cores."""
LOGITS_AT_ONCE = {"cpu": 2**21, "cuda": 2**24}
"""Maximum number of logits that the loss is computed from at once, by device."""


class TokensOfText(Protocol):
    """The part of `workhorse.tokenizers.Tokenizer` that evaluation uses."""

    def encode_batch(self, texts: Sequence[str], /, *, begins: bool) -> list[list[int]]: ...
    def count_unknown(self, ids: Sequence[int], /) -> int: ...


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of evaluating a model on documents."""

    loss: float
    """Nats per predicted token."""
    perplexity: float
    """`exp(loss)`; inf if that overflows."""
    bits_per_byte: float
    """Bits needed to encode the documents with the model, per UTF-8 byte; comparable between
    tokenizers. The ends of documents are not encoded, unlike in validation during training; see
    docs/evaluation.md."""
    tokens: int
    """Number of predicted tokens."""
    bytes: int
    """UTF-8 bytes of the documents."""
    documents: int
    unpredicted: int
    """Number of documents whose first token was not predicted, because `start` was None."""
    unknown: int
    """Number of tokens that stand for characters outside the vocabulary. If there are any, the
    other figures are too low: the model does not have to predict which characters they are."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(
    decoder: Decoder,
    tokenizer: TokensOfText,
    documents: Iterable[Document],
    *,
    start: int | None,
    context: int | None = None,
    stride: int | None = None,
    batch_size: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Evaluate a model by predicting every token of every document once.

    No window spans two documents. The end of a document is not predicted.

    Args:
        decoder: the model; dropout is off during evaluation.
        tokenizer: the tokenizer that the model was trained with.
        documents: the documents, read once, a few at a time. The pieces of a long document are
            joined.
        start: the token that training put before a document (bos, or the eos of the previous
            document), from which its first token is predicted. None if there is none: `loss` then
            does not include first tokens, and `bits_per_byte` counts log2(vocabulary) bits for
            each, the cost of encoding it without a model.
        context: the maximum number of tokens of a window; None for the model's context.
        stride: the number of tokens predicted by each window after the first of a document; see
            `windows`. None for the whole context, so that windows do not overlap.
        batch_size: the number of windows in a forward pass; it affects only speed and memory. None
            for `TOKENS_AT_ONCE` tokens.
        progress: called with the number of bytes read so far.

    Raises:
        WorkhorseError: `context` is longer than the model's, `stride` is larger than the context,
            attention is not causal, the documents have no token to predict, or the loss is not
            finite.
    """
    context = decoder.max_seq_len if context is None else context
    device = decoder.device
    stride = context if stride is None else stride
    _check(decoder, context, stride, batch_size)
    if batch_size is None:
        batch_size = max(1, _fitting(device, TOKENS_AT_ONCE) // context)
    tally = _Tally()
    with evaluation_mode(decoder), torch.no_grad():
        cut = _windows(
            documents,
            tokenizer,
            start,
            context=context,
            stride=stride,
            tally=tally,
            progress=progress,
        )
        for batch in batches(cut, batch_size):
            tally.nats += _nats(decoder, batch, device)
    return tally.result(decoder.config.vocab_size, starts=start is not None)


def _check(decoder: Decoder, context: int, stride: int, batch_size: int | None) -> None:
    if not 1 <= context <= decoder.max_seq_len:
        raise WorkhorseError(
            f"context={context} is not within the model's max_seq_len={decoder.max_seq_len}; "
            f"choose 1 to {decoder.max_seq_len}"
        )
    if not 1 <= stride <= context:
        raise WorkhorseError(f"stride={stride} is not within the context; choose 1 to {context}")
    if batch_size is not None and batch_size < 1:
        raise WorkhorseError(f"batch_size={batch_size} is not positive; choose 1 or more")
    check_causal(decoder)


def check_causal(decoder: Decoder) -> None:
    """Check that a model does not see the tokens it should predict.

    Raises:
        WorkhorseError: one of its blocks is not causal.
    """
    for name, block in decoder.config.blocks.items():
        if not block.attention.causal:
            raise WorkhorseError(
                f"block {name!r} is not causal, so it sees the tokens it must predict; "
                "use causal=true"
            )


@dataclass
class _Tally:
    """Running sums over the evaluated documents."""

    nats: float = 0.0
    tokens: int = 0
    bytes: int = 0
    documents: int = 0
    unknown: int = 0

    def result(self, vocab_size: int, starts: bool) -> Evaluation:
        """Compute the result of the evaluation from the sums.

        `starts` is True if the first tokens of documents were predicted.
        """
        if self.tokens == 0:
            raise WorkhorseError(
                f"the documents are too short: {self.bytes} bytes have no token to predict; use "
                "longer ones"
            )
        if not math.isfinite(self.nats):
            raise WorkhorseError("the loss is not a finite number; the model's weights are damaged")
        loss = self.nats / self.tokens
        unpredicted = 0 if starts else self.documents
        bits = (self.nats + unpredicted * math.log(vocab_size)) / math.log(2)
        return Evaluation(
            loss=loss,
            perplexity=math.exp(loss) if loss < math.log(sys.float_info.max) else math.inf,
            bits_per_byte=bits / self.bytes,
            tokens=self.tokens,
            bytes=self.bytes,
            documents=self.documents,
            unpredicted=unpredicted,
            unknown=self.unknown,
        )


def _windows(
    documents: Iterable[Document],
    tokenizer: TokensOfText,
    start: int | None,
    *,
    context: int,
    stride: int,
    tally: _Tally,
    progress: Callable[[int], None] | None,
) -> Iterator[Window]:
    """Yield the windows of all documents, document by document."""
    number = 0

    def whole(piece: Document) -> int:
        nonlocal number
        number += piece.begins
        return number

    def tokens(pieces: Iterable[Document]) -> Iterator[Sequence[int]]:
        empty = True
        if start is not None:
            yield [start]
        for piece in pieces:
            (encoded,) = tokenizer.encode_batch([piece.text], begins=piece.begins)
            tally.documents += empty and bool(encoded)
            empty = empty and not encoded
            tally.bytes += len(piece.text.encode())
            tally.unknown += tokenizer.count_unknown(encoded)
            yield encoded
            if progress is not None:
                progress(tally.bytes)

    for _, pieces in groupby(documents, key=whole):
        for window in windows(tokens(pieces), context, stride):
            tally.tokens += len(window.targets)
            yield window


def _fitting(device: torch.device, sizes: dict[str, int]) -> int:
    return sizes.get(device.type, sizes["cuda"])


def _nats(decoder: Decoder, batch: Batch, device: torch.device) -> float:
    """Sum the loss in nats over all targets except `IGNORE`. No other logits are computed."""
    targets = batch.targets.to(device)
    counted = targets >= 0
    positions = padded_positions(decoder, batch.lengths, device)
    x = decoder.hidden(batch.inputs.to(device), positions=positions)[counted]
    most = _fitting(x.device, LOGITS_AT_ONCE)
    found = TokenLogprobs(most)(x[None], targets[counted][None], decoder.head)
    return -found.target.double().sum().item()

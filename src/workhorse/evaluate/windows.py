"""A text cut into windows of the context's length, so that every token is predicted once."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from workhorse.nn import IGNORE, Decoder


@dataclass(frozen=True, slots=True)
class Window:
    """Inputs of one forward pass and their targets.

    The first `len(inputs) - len(targets)` inputs are only context for the others: their targets
    were predicted in the window before.
    """

    inputs: Sequence[int]
    targets: Sequence[int]


def windows(chunks: Iterable[Sequence[int]], context: int, stride: int) -> Iterator[Window]:
    """Cut a text: the first window predicts `context` tokens, each later one the next `stride`.

    Args:
        chunks: the tokens of the text, a few at a time; the very first is only conditioned on, all
            others are predicted.
        context: most inputs of a window.
        stride: `context` for windows that do not overlap (the first prediction of each sees one
            token); with a smaller one every later prediction sees at least `context - stride + 1`
            tokens, at `context / stride` times the cost.
    """
    held: list[int] = []  # tokens that a later window still needs
    predicted = 0  # of those after the first held one
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
    """Likewise."""
    lengths: Sequence[int]
    """Number of inputs of each window."""


def batches(pieces: Iterable[Window], batch_size: int, ahead: int = 64) -> Iterator[Batch]:
    """Batches of windows of about equal length.

    Windows are sorted by length within `ahead` batches at a time, then padded on the right, which a
    causal model does not see; targets that do not count are `IGNORE`.
    """
    pieces = iter(pieces)
    while some := list(islice(pieces, batch_size * ahead)):
        some.sort(key=lambda window: len(window.inputs), reverse=True)
        for start in range(0, len(some), batch_size):
            yield _padded(some[start : start + batch_size])


def padded_positions(
    decoder: Decoder, lengths: Sequence[int], device: torch.device
) -> Tensor | None:
    """Positions of the tokens in rows of these lengths, padded on the right; -1 is padding.

    None if they are not needed: causal attention does not see the padding, so positions matter only
    if rotations depend on the length of a text.
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

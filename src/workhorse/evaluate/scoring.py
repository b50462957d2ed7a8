"""Log-probabilities of continuations of contexts: the arithmetic of multiple-choice tasks."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from workhorse.errors import WorkhorseError
from workhorse.evaluate.evaluation import TOKENS_AT_ONCE, padded_positions
from workhorse.nn import Decoder, evaluation_mode
from workhorse.nn.logprobs import score as token_terms

LOGITS_AT_ONCE = 2**26
"""256 MiB of float32: with a large vocabulary, all logits of a batch would take many times that."""


class Question(NamedTuple):
    """Tokens that are given, and tokens to score after them; neither is empty."""

    context: Sequence[int]
    continuation: Sequence[int]

    def inputs(self, limit: int) -> tuple[int, ...]:
        """The model's input: all but the last token, of which at most the last `limit`."""
        return (*self.context, *self.continuation)[-(limit + 1) : -1]


class Score(NamedTuple):
    """The score of a continuation."""

    logprob: float
    """Summed over the continuation's tokens, in nats."""
    is_greedy: bool
    """Whether each of its tokens is the likeliest at its position."""


def score(
    decoder: Decoder,
    questions: Sequence[Question],
    *,
    max_length: int | None = None,
    batch_size: int | None = None,
) -> Iterator[list[tuple[int, Score]]]:
    """Score continuations, the longest first, so that a lack of memory shows at once.

    Questions with the same input, such as one-token answers to one question, are computed once.

    Args:
        decoder: the model; dropout is off meanwhile.
        questions: one longer than the context is truncated on the left.
        max_length: most tokens read of a question; the model's context by default.
        batch_size: distinct texts in a forward pass, which changes only speed and memory. By
            default, as many as suit the device.

    Yields:
        The scores of one batch, each with the number of its question.

    Raises:
        WorkhorseError: a continuation that is empty, or longer than `max_length`.
    """
    limit = decoder.max_seq_len if max_length is None else max_length
    same: dict[tuple[int, ...], list[int]] = {}
    for number, question in enumerate(questions):
        _check(question, limit)
        same.setdefault(question.inputs(limit), []).append(number)
    rows = sorted(same, key=lambda inputs: (-len(inputs), inputs))
    device = decoder.device
    with evaluation_mode(decoder), torch.no_grad():
        for batch in by_length(rows, batch_size, device):
            numbers = [same[inputs] for inputs in batch]
            cells = [
                (row, questions[number].continuation)
                for row, together in enumerate(numbers)
                for number in together
            ]
            scores = _score_batch(decoder, batch, cells, device)
            yield list(zip((n for together in numbers for n in together), scores, strict=True))


def by_length(
    rows: Sequence[tuple[int, ...]], batch_size: int | None, device: torch.device, room: int = 0
) -> Iterator[Sequence[tuple[int, ...]]]:
    """Rows sorted from the longest, in batches of a size or of a number of tokens.

    Args:
        rows: token ids.
        batch_size: rows in a batch; None: about `TOKENS_AT_ONCE` tokens.
        device: where they will be computed.
        room: tokens that will be added to each row.
    """
    tokens = TOKENS_AT_ONCE.get(device.type, TOKENS_AT_ONCE["cuda"])
    start = 0
    while start < len(rows):
        size = batch_size or max(1, tokens // (len(rows[start]) + room))
        yield rows[start : start + size]
        start += size


def _check(question: Question, limit: int) -> None:
    length = len(question.continuation)
    if length == 0 or not question.context:
        raise WorkhorseError(
            "a question has an empty context or continuation, of which nothing can be predicted; "
            "correct the task"
        )
    if length > limit:
        raise WorkhorseError(
            f"a continuation has {length} tokens and {limit} can be read; shorten it, or use a "
            "model with a longer context"
        )


def _score_batch(
    decoder: Decoder,
    rows: Sequence[tuple[int, ...]],
    cells: Sequence[tuple[int, Sequence[int]]],
    device: torch.device,
) -> list[Score]:
    """The scores of continuations that end one token after their row does.

    Args:
        decoder: in evaluation mode.
        rows: inputs, the longest first; padded on the right, which a causal model does not see.
        cells: a row's index and the continuation to score on it.
        device: the model's.
    """
    tokens = torch.zeros(len(rows), len(rows[0]), dtype=torch.int64)
    for row, inputs in enumerate(rows):
        tokens[row, : len(inputs)] = torch.tensor(inputs)
    positions = padded_positions(decoder, [len(inputs) for inputs in rows], device)
    x = decoder.hidden(tokens.to(device), positions=positions)
    # Where each token of each continuation is predicted; nothing else gets logits.
    where = [
        (row, len(rows[row]) - len(continuation) + place)
        for row, continuation in cells
        for place in range(len(continuation))
    ]
    row, place = torch.tensor(where, device=device).unbind(dim=1)
    targets = torch.tensor([t for _, tokens in cells for t in tokens], device=device)
    logprobs, greedy = _predictions(decoder, x[row, place], targets)
    lengths = [len(continuation) for _, continuation in cells]
    return [
        Score(float(nats.sum()), bool(hits.all()))
        for nats, hits in zip(logprobs.split(lengths), greedy.split(lengths), strict=True)
    ]


def _predictions(decoder: Decoder, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, float64, and whether it is the likeliest, on the CPU.

    Args:
        decoder: has the head.
        x: (positions, d_model) hidden states.
        targets: (positions,)
    """
    at_once = max(1, LOGITS_AT_ONCE // decoder.config.vocab_size)
    logprobs: list[Tensor] = []
    greedy: list[Tensor] = []
    for hidden, expected in zip(x.split(at_once), targets.split(at_once), strict=True):
        logits = decoder.unembed(hidden[None])[0].float()
        logprobs.append(token_terms(logits, expected)[:, 0].double())
        greedy.append(logits.argmax(dim=-1) == expected)
    return torch.cat(logprobs).cpu(), torch.cat(greedy).cpu()

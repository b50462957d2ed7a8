"""Log-probabilities of continuations after a context, as multiple-choice tasks need them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from workhorse.errors import WorkhorseError
from workhorse.evaluate.evaluation import TOKENS_AT_ONCE, padded_positions
from workhorse.nn import Decoder, evaluation_mode
from workhorse.nn.logprobs import score as token_terms

LOGITS_AT_ONCE = 2**26
"""Maximum number of logits at once, 256 MiB of float32. With a large vocabulary, all logits of a
batch would take many times that."""


class Question(NamedTuple):
    """A context and a continuation to score after it, as token ids; neither is empty."""

    context: Sequence[int]
    continuation: Sequence[int]

    def inputs(self, limit: int) -> tuple[int, ...]:
        """Return the model's input: all but the last token, truncated to the last `limit`."""
        return (*self.context, *self.continuation)[-(limit + 1) : -1]


class Score(NamedTuple):
    """The score of a continuation."""

    logprob: float
    """Log-probability of the continuation in nats, the sum over its tokens."""
    is_greedy: bool
    """True if each token of the continuation is the likeliest at its position."""


def score(
    decoder: Decoder,
    questions: Sequence[Question],
    *,
    max_length: int | None = None,
    batch_size: int | None = None,
) -> Iterator[list[tuple[int, Score]]]:
    """Score continuations, the longest first, so that out-of-memory errors occur at once.

    Questions with the same input, such as one-token answers to one question, are computed once.

    Args:
        decoder: the model; dropout is off during scoring.
        questions: the questions; those longer than the context are truncated on the left.
        max_length: the maximum number of input tokens; the model's context by default.
        batch_size: the number of distinct sequences in a forward pass; it affects only speed and
            memory. By default it is chosen for the device.

    Yields:
        The scores of one batch, each with the index of its question.

    Raises:
        WorkhorseError: a context or continuation is empty, or a continuation is longer than
            `max_length`.
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
    """Split sequences into batches of a given size or of a given number of tokens.

    Args:
        rows: sequences of token ids, the longest first.
        batch_size: the number of sequences in a batch; None: about `TOKENS_AT_ONCE` tokens.
        device: the device that will compute them.
        room: the number of tokens that will be added to each sequence.
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
            "a question has an empty context or continuation, so nothing can be predicted; "
            "correct the task"
        )
    if length > limit:
        raise WorkhorseError(
            f"a continuation has {length} tokens, more than the limit of {limit}; shorten it, or "
            "use a model with a longer context"
        )


def _score_batch(
    decoder: Decoder,
    rows: Sequence[tuple[int, ...]],
    cells: Sequence[tuple[int, Sequence[int]]],
    device: torch.device,
) -> list[Score]:
    """Score the continuations of one batch of inputs.

    The last token of a continuation is not part of its input; it is only predicted.

    `rows` are the inputs, the longest first. They are padded on the right, which does not affect a
    causal model. `cells` are pairs of an input's index and a continuation to score on this input.
    """
    tokens = torch.zeros(len(rows), len(rows[0]), dtype=torch.int64)
    for row, inputs in enumerate(rows):
        tokens[row, : len(inputs)] = torch.tensor(inputs)
    positions = padded_positions(decoder, [len(inputs) for inputs in rows], device)
    x = decoder.hidden(tokens.to(device), positions=positions)
    # The position that predicts each token of each continuation; no other logits are computed.
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
    """Compute the log-probability of each target and whether it is the likeliest token.

    From hidden states (positions, d_model) and targets (positions,), return the log-probabilities
    in float64 and the booleans, both (positions,) on the CPU.
    """
    at_once = max(1, LOGITS_AT_ONCE // decoder.config.vocab_size)
    logprobs: list[Tensor] = []
    greedy: list[Tensor] = []
    for hidden, expected in zip(x.split(at_once), targets.split(at_once), strict=True):
        logits = decoder.unembed(hidden[None])[0].float()
        logprobs.append(token_terms(logits, expected)[:, 0].double())
        greedy.append(logits.argmax(dim=-1) == expected)
    return torch.cat(logprobs).cpu(), torch.cat(greedy).cpu()

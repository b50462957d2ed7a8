"""Kinds of attention heads, recognised by the positions that they attend to.

The scores are mean attention weights, from 0 to 1, over the queries for which the kind is defined:

| kind | key that a head of this kind attends to | queries |
|---|---|---|
| previous token | the token before | all but the first |
| first token | the first token of the sequence | all but the first |
| current token | the query's own token | all but the first |
| duplicate token | earlier occurrences of the query's token | tokens that occurred before |
| induction | tokens after earlier occurrences of the query's token | tokens that occurred before |

Papers: A Mathematical Framework for Transformer Circuits (Elhage et al., 2021); In-context Learning
and Induction Heads, 2209.11895; Interpretability in the Wild, 2211.00593 (duplicate tokens).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from workhorse.config.arguments import integer
from workhorse.errors import WorkhorseError
from workhorse.inspect.trace import Trace, Tracer
from workhorse.nn import Decoder

KINDS = ("previous token", "first token", "current token", "duplicate token", "induction")
WEIGHTS = "layers.*.attention.kernel.weights"


def attention_patterns(run: Trace) -> list[Tensor]:
    """The attention weights of every layer, each (batch, heads, queries, keys)."""
    layers = sum(name.endswith(".kernel.weights") for name in run)
    if not layers:
        raise WorkhorseError(f"the pass kept no attention weights; keep {WEIGHTS!r}")
    return [run[WEIGHTS.replace("*", str(number))] for number in range(layers)]


def repeated_tokens(
    vocab_size: int, length: int, batch: int = 1, *, seed: int = 0, start: int | None = None
) -> Tensor:
    """Random sequences of tokens, each written twice, (batch, 2 · length), or one token more.

    A sequence holds different tokens if the vocabulary has at least `length`.

    Args:
        vocab_size: number of different tokens.
        length: number of tokens before the repetition.
        batch: number of sequences.
        seed: seed of the random tokens.
        start: a token to put before every sequence, or None.
    """
    vocab_size, length = integer("vocab_size", vocab_size, 1), integer("length", length, 1)
    batch = integer("batch", batch, 1)
    random = torch.Generator().manual_seed(seed)
    order = torch.rand(batch, vocab_size, generator=random).argsort(-1)
    if length > vocab_size:
        order = torch.randint(vocab_size, (batch, length), generator=random)
    half = order[:, :length]
    first = [] if start is None else [torch.full((batch, 1), start)]
    return torch.cat([*first, half, half], dim=1)


def head_scores(
    decoder: Decoder, tokens: Tensor | Sequence[int] | None = None, *, seed: int = 0
) -> dict[str, Tensor]:
    """The scores of every head for every kind in `KINDS`, each (layers, heads).

    Args:
        decoder: see `Tracer`.
        tokens: token ids, (batch, seq) or (seq); None: eight random sequences, each written twice,
            of up to 50 different tokens. Give shorter ones of `repeated_tokens` for a model that
            was trained on shorter sequences than `max_seq_len`: its heads may not work on longer
            ones.
        seed: seed of the random sequences.

    Returns:
        By kind, the scores; NaN for heads that a layer does not have, and for kinds that are not
        defined for any query.

    Raises:
        WorkhorseError: see `trace`.
    """
    tracer = Tracer(decoder)
    if tokens is None:
        vocab = decoder.config.vocab_size
        length = max(1, min(50, vocab, decoder.max_seq_len // 2))
        tokens = repeated_tokens(vocab, length, 8, seed=seed)
    return scores_of(tracer(tokens, keep=(WEIGHTS,)))


def scores_of(run: Trace) -> dict[str, Tensor]:
    """The scores of the heads in one pass; see `head_scores`."""
    keys = _keys(run.tokens)
    weights = attention_patterns(run)
    heads = max(each.shape[1] for each in weights)
    found = {kind: torch.full((len(weights), heads), torch.nan) for kind in KINDS}
    for layer, each in enumerate(weights):
        for kind, (wanted, queries) in keys.items():
            attention = (each.float() * wanted[:, None]).sum(-1)  # (batch, heads, queries)
            counted = queries[:, None].expand_as(attention)
            total = (attention * counted).sum((0, 2)) / counted.sum((0, 2))
            found[kind][layer, : each.shape[1]] = total.detach().cpu()
    return found


def head_labels(scores: dict[str, Tensor], threshold: float = 0.4) -> list[list[str | None]]:
    """For each layer and head, the kind with the largest score, or None below the threshold.

    Args:
        scores: result of `head_scores`.
        threshold: smallest score of a label, from 0 to 1.

    Raises:
        WorkhorseError: the threshold is outside this range.
    """
    if not 0 <= threshold <= 1:
        raise WorkhorseError(f"threshold={threshold} is not a score; choose one from 0 to 1")
    best, kind = torch.stack([scores[name].nan_to_num(-1) for name in KINDS]).max(0)
    return [
        [
            KINDS[int(k)] if b >= threshold else None
            for b, k in zip(best[layer], kind[layer], strict=True)
        ]
        for layer in range(len(best))
    ]


def _keys(tokens: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """By kind: the keys to attend to, (batch, queries, keys), and the queries that count."""
    seq = tokens.shape[1]
    key = torch.arange(seq, device=tokens.device)[None]
    query = key.T
    same = (tokens[:, :, None] == tokens[:, None, :]) & (key < query)
    after = torch.zeros_like(same)
    after[:, :, 1:] = same[:, :, :-1]
    later, seen = (key > 0).expand_as(tokens), same.any(-1)
    return {
        "previous token": ((key == query - 1).expand_as(same), later),
        "first token": ((key == 0).expand_as(same), later),
        "current token": ((key == query).expand_as(same), later),
        "duplicate token": (same, seen),
        "induction": (after, seen),
    }

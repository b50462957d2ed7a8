"""The updates `scale · B A` of an adapter as tensors, for files of other programs."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from workhorse.nn import Decoder
from workhorse.transforms.adapters import adapted_layers, adapters_of


class Update(NamedTuple):
    """The update of a matrix, or of each matrix of a stack."""

    a: Tensor
    """(…, rank, in_features)."""
    b: Tensor
    """(…, out_features, rank)."""
    magnitude: Tensor | None
    """DoRA's magnitudes, (…, out_features)."""
    alpha: float
    """`scale` is alpha divided by `LoraConfig.divisor` of the rank."""

    @property
    def rank(self) -> int:
        return self.a.shape[-2]


def updates_of(decoder: Decoder, name: str) -> dict[str, Update]:
    """The updates of an adapter, by the name of the weight that each belongs to."""
    config = adapters_of(decoder)[name]
    found: dict[str, Update] = {}
    for path, layer in adapted_layers(decoder).items():
        if name in layer.adapters:
            own = {key: one.detach() for key, one in layer.adapters[name].named_parameters()}
            found[f"{path}.weight"] = Update(
                own["lora_a.weight"],
                own["lora_b.weight"],
                own.get("magnitude"),
                config.of(path).alpha,
            )
    return found


def with_shared_a(
    updates: Sequence[Update | None],
    shapes: Sequence[tuple[int, ...]],
    divisor: Callable[[int], float],
) -> tuple[Tensor, list[Tensor], float]:
    """Express the updates of several matrices with the same input by one A.

    If all updates have the same A, it is that A. Otherwise it is all A's, stacked along the rank:
    each B is zero in the columns of the other A's, and the rank is the sum of the ranks.

    Args:
        updates: the update of each matrix, or None for a matrix that has none.
        shapes: the shapes of the matrices.
        divisor: returns the divisor of alpha for a rank.

    Returns:
        A, the B of each matrix, and alpha.
    """
    given = [update for update in updates if update is not None]
    first = given[0]
    shared = all(torch.equal(update.a, first.a) for update in given)
    a = first.a if shared else torch.cat([update.a for update in given], -2)
    rank, column = a.shape[-2], 0
    scale = first.alpha / divisor(first.rank)
    all_b: list[Tensor] = []
    for update, shape in zip(updates, shapes, strict=True):
        b = first.b.new_zeros(*shape[:-1], rank)
        if update is not None:
            factor = update.alpha / divisor(update.rank) / scale
            b[..., column : column + update.rank] = update.b * factor
            column += 0 if shared else update.rank
        all_b.append(b)
    return a, all_b, first.alpha * (divisor(rank) / divisor(first.rank))

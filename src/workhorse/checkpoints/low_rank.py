"""The updates `scale · B A` of an adapter as tensors, for files of other programs."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from workhorse.nn import Decoder
from workhorse.transforms.adapters import adapted_layers, adapters_of
from workhorse.transforms.lora import Dora, LowRank


class Update(NamedTuple):
    """The update of a matrix, or of each matrix of a stack."""

    a: Tensor
    """(…, rank, in_features)."""
    b: Tensor
    """(…, out_features, rank)."""
    magnitude: Tensor | None
    """DoRA's magnitudes, (…, out_features)."""
    alpha: float

    @property
    def rank(self) -> int:
        return self.a.shape[-2]


def updates_of(decoder: Decoder, name: str) -> dict[str, Update]:
    """The updates of an adapter, by the name of the weight that each belongs to."""
    config = adapters_of(decoder)[name]
    found: dict[str, Update] = {}
    for path, layer in adapted_layers(decoder).items():
        if name in layer.adapters:
            adapter = layer.adapters[name]
            assert isinstance(adapter, LowRank)
            a, b = adapter.lora_a.weight.detach(), adapter.lora_b.weight.detach()
            magnitude = adapter.magnitude.detach() if isinstance(adapter, Dora) else None
            found[f"{path}.weight"] = Update(a, b, magnitude, config.of(path).alpha)
    return found


def with_one_a(
    updates: Sequence[Update | None],
    shapes: Sequence[tuple[int, ...]],
    divisor: Callable[[int], float],
) -> tuple[Tensor, list[Tensor], float]:
    """Express the updates of several matrices with the same input by one A.

    This is the A that all share, or all A's below each other: then each B is zero in the columns of
    the other A's, and the rank is the sum of the ranks.

    Args:
        updates: the update of each matrix, or None for a matrix that has none.
        shapes: the shapes of the matrices.
        divisor: the divisor of alpha for a rank.

    Returns:
        A, the B of each matrix, and alpha.
    """
    given = [one for one in updates if one is not None]
    first = given[0]
    shared = all(torch.equal(one.a, first.a) for one in given)
    a = first.a if shared else torch.cat([one.a for one in given], -2)
    rank, at = a.shape[-2], 0
    unit = first.alpha / divisor(first.rank)
    parts: list[Tensor] = []
    for one, shape in zip(updates, shapes, strict=True):
        parts.append(first.b.new_zeros(*shape[:-1], rank))
        if one is not None:
            parts[-1][..., at : at + one.rank] = one.b * (one.alpha / divisor(one.rank) / unit)
            at += 0 if shared else one.rank
    return a, parts, first.alpha * (divisor(rank) / divisor(first.rank))

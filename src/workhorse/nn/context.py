"""What the layers of one forward pass share: positions, rotations, masks.

Made by the decoder at each call; nothing of it lives on a module. What is costly is computed at
first use and kept for the layers that follow, under a key of what it depends on.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch

from workhorse.errors import WorkhorseError
from workhorse.nn.cache import Cache
from workhorse.nn.kernels import Kernel
from workhorse.nn.masks import AttentionPattern, Placement
from workhorse.nn.rope import RopeConfig
from workhorse.nn.shapes import Angles, Positions, Tokens


class Context:
    """The shared part of one forward pass over `batch × seq` tokens.

    Args:
        batch: rows.
        seq: tokens a row.
        device: where the tokens are.
        positions: where each token stands, rising along a row (along a document, with `documents`);
            -1 marks padding. Left out: 0, 1, 2 …, after what the cache holds.
        documents: a number for each token; tokens of different documents do not see each other and
            positions start again with each document.
        cache: what earlier tokens left; this call takes the new ones in.

    Raises:
        WorkhorseError: shapes that do not fit, or documents with a cache.
    """

    def __init__(
        self,
        batch: int,
        seq: int,
        device: torch.device,
        *,
        positions: Positions | None = None,
        documents: Tokens | None = None,
        cache: Cache | None = None,
    ) -> None:
        for name, given in (("positions", positions), ("documents", documents)):
            if given is not None and given.shape != (batch, seq):
                raise WorkhorseError(
                    f"{name} has shape {tuple(given.shape)} for tokens of shape {(batch, seq)}; "
                    "give one number for each token"
                )
        if documents is not None and cache is not None:
            raise WorkhorseError(
                "packed documents cannot be cached; decode each in a row of its own"
            )
        self.cache = cache
        self.uniform = positions is None and documents is None
        if cache is not None:
            self.positions = cache.begin(batch, seq, positions)
            self.uniform = cache.uniform
        elif positions is not None:
            self.positions = positions
        elif documents is not None:
            self.positions = positions_within(documents)
        else:
            self.positions = torch.arange(seq, device=device)[None]
        self.length = seq if cache is None else cache.length
        self.place = Placement(
            self.positions, self.positions, documents=documents, aligned=self.uniform
        )
        self._made: dict[Hashable, Any] = {}

    def rotation(
        self, name: str, rope: RopeConfig, head_dim: int, dtype: torch.dtype
    ) -> tuple[Angles, Angles]:
        """Cosines and sines of that rotation for this pass; equal rotations have equal names."""

        def make() -> tuple[Angles, Angles]:
            cos, sin = rope.angles(self.positions, head_dim, self.length)
            return cos.to(dtype), sin.to(dtype)

        return self._once((name, head_dim, dtype), make)

    def mask(self, pattern: AttentionPattern, kernel: Kernel, dtype: torch.dtype) -> Any:
        """The pattern over this pass's queries and keys, as that kernel wants it."""

        def make() -> Any:
            place = self.place if self.cache is None else self.cache.track(pattern.reach).place
            effective = pattern.within(self.length) if self.uniform else pattern
            return kernel.render(effective, place, dtype)

        return self._once((pattern, type(kernel), dtype), make)

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def positions_within(documents: Tokens) -> Positions:
    """Positions that count from 0 in each run of equal document numbers."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(starts, index, 0).cummax(dim=1).values

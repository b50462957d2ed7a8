"""What the layers of one forward pass share: positions, rotations, masks.

Made by the decoder at each call; nothing of it lives on a module. What is costly is computed at
first use and kept for the layers that follow, under a key of what it depends on.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workhorse.errors import WorkhorseError, shown
from workhorse.nn.attention.kernels import Kernel
from workhorse.nn.attention.masks import AttentionPattern, Placement
from workhorse.nn.cache.view import CacheEntry, CacheView
from workhorse.nn.positions.rope import RopeConfig
from workhorse.nn.shapes import Angles, Hidden, Lengths, Positions, Slots, Tokens


class Context:
    """The shared part of one forward pass over `batch × seq` tokens.

    Args:
        batch: rows.
        seq: tokens a row.
        device: where the tokens are.
        positions: where each token stands, rising along a row (along a document, with `documents`);
            -1 marks padding. With a cache they count on from what a row holds, without gaps. Left
            out: 0, 1, 2 …, after what the cache holds.
        documents: a number for each token. A run of equal numbers is a document: it sees nothing
            outside itself, and its positions start at 0.
        cache: what earlier tokens left; this call takes the new ones in.
        max_positions: how many positions there are, where that is limited.

    Raises:
        WorkhorseError: shapes that do not fit, no tokens, more tokens than positions, or documents
            with a cache. The cache is then as it was.
    """

    def __init__(
        self,
        batch: int,
        seq: int,
        device: torch.device,
        *,
        positions: Positions | None = None,
        documents: Tokens | None = None,
        cache: CacheView | None = None,
        max_positions: int | None = None,
    ) -> None:
        _check((batch, seq), positions, documents, cache)
        self.batch, self.seq = batch, seq
        self.cache = cache
        runs = None if documents is None else number_runs(documents)
        if positions is not None:
            self.positions = positions
        elif runs is not None:
            self.positions = torch.arange(seq, device=device) - runs.starts
        elif cache is not None:
            self.positions = cache.next_positions(seq)
        else:
            self.positions = torch.arange(seq, device=device)[None]
        plain = positions is None and documents is None
        self.uniform = plain and (cache is None or cache.uniform)
        self.length = seq if cache is None else cache.length + seq
        # Positions of our own making stay below the length; others are looked up on the device. The
        # parts of a packed pass check theirs.
        packed = cache is not None and bool(cache.parts)
        if max_positions is not None and not packed:
            self._check_positions(max_positions, given=positions is not None)
        if cache is not None:
            cache.begin(self.positions, uniform=plain)
        self.place = Placement(
            self.positions,
            self.positions,
            documents=None if runs is None else runs.numbers,
            aligned=self.uniform,
        )
        self._made: dict[Hashable, Any] = {}
        self.parts = [
            Context(len(view.lengths), new, device, cache=view, max_positions=max_positions)
            for view, new in (() if cache is None else cache.parts)
        ]

    def by_part(self, mix: Callable[..., Tensor], *xs: Tensor, cache: CacheEntry | None) -> Tensor:
        """`mix(*xs, context, cache)`, where `mix` lets the tokens of a sequence see each other.

        The parts of a packed pass (see `CacheView.parts`) are computed one after the other.

        Args:
            mix: takes tensors (batch, seq, ...), a context and a cache entry; returns (batch, seq,
                ...).
            xs: its tensors.
            cache: the layer's entry.
        """
        if not self.parts or cache is None:
            return mix(*xs, self, cache)
        sizes = [(part.batch, part.seq) for part in self.parts]
        counts = [batch * seq for batch, seq in sizes]
        pieces = [torch.split_with_sizes(x[0], counts) for x in xs]
        mixed = [
            mix(*(x.unflatten(0, size) for x in own), part, entry).flatten(0, 1)
            for part, entry, size, *own in zip(self.parts, cache.parts, sizes, *pieces, strict=True)
        ]
        return torch.cat(mixed)[None]

    def rotation(
        self, name: str, rope: RopeConfig, head_dim: int, dtype: torch.dtype
    ) -> tuple[Angles, Angles]:
        """Cosines and sines of that rotation for this pass; equal rotations have equal names."""

        def make() -> tuple[Angles, Angles]:
            alike = self.uniform or not rope.depends_on_length
            length = self.length if alike else self._once("lengths", self._lengths)
            cos, sin = rope.angles(self.positions, head_dim, length)
            return cos.to(dtype), sin.to(dtype)

        return self._once((name, head_dim, dtype), make)

    def mask(self, pattern: AttentionPattern, kernel: Kernel, dtype: torch.dtype) -> Any:
        """The pattern over this pass's queries and keys, as that kernel wants it."""

        def make() -> Any:
            place = self.place if self.cache is None else self.cache.place(pattern.reach)
            effective = pattern.within(self.length) if self.uniform else pattern
            return kernel.render(effective, place, dtype)

        return self._once((pattern, type(kernel), dtype), make)

    def slots_before(self, reach: int) -> tuple[Slots, Slots]:
        """What the cache says of it; see `CacheView.slots_before`."""
        cache = self.cache
        assert cache is not None
        return self._once(("slots_before", reach), lambda: cache.slots_before(reach))

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _lengths(self) -> Lengths:
        """Tokens of each row so far, or of each token's document; padding does not count."""
        if self.cache is not None:
            return self.cache.text_lengths()
        documents = self.place.documents
        if documents is None:
            return self.positions.amax(dim=1, keepdim=True) + 1
        return lengths_of_documents(self.positions, documents)

    def _check_positions(self, limit: int, *, given: bool) -> None:
        if not given and self.length <= limit:
            return
        used = self.length if self.uniform else int(self.positions.max()) + 1
        if used > limit:
            raise WorkhorseError(
                f"a text of {used} tokens does not fit max_seq_len={limit} positions; shorten it"
            )


def context_alone(x: Hidden, d_model: int, entry: CacheEntry | None = None) -> Context:
    """The context of a layer that is called by itself, as in a notebook.

    Raises:
        WorkhorseError: `x` has another number of dimensions or width; or with an entry of a cache,
            whose context alone knows what the cache holds.
    """
    _check_tensor("x", x, "(batch, seq, d_model)")
    if x.dim() != 3:  # noqa: PLR2004
        raise WorkhorseError(
            f"x has the shape {tuple(x.shape)}; give (batch, seq, d_model), "
            "a single text as x[None]"
        )
    if x.shape[2] != d_model:
        raise WorkhorseError(
            f"x has the shape {tuple(x.shape)} and the layer d_model={d_model}; give that width"
        )
    if entry is not None:
        raise WorkhorseError(
            "an entry of a cache needs the cache's context; give Context(batch, seq, device, "
            "cache=cache) too"
        )
    return Context(x.shape[0], x.shape[1], x.device)


def _check(
    shape: tuple[int, int],
    positions: Positions | None,
    documents: Tokens | None,
    cache: CacheView | None,
) -> None:
    if 0 in shape:
        raise WorkhorseError("there are no tokens; give at least one")
    for name, given in (("positions", positions), ("documents", documents)):
        if given is None:
            continue
        _check_tensor(name, given, "(batch, seq)")
        if given.shape != shape:
            raise WorkhorseError(
                f"{name} has shape {tuple(given.shape)} for tokens of shape {shape}; "
                "give one number for each token"
            )
    _check_cache(cache)
    if cache is not None and len(cache.lengths) != shape[0]:
        raise WorkhorseError(
            f"the cache has {len(cache.lengths)} rows and the tokens {shape[0]}; "
            "make one cache for each batch"
        )
    if documents is not None and cache is not None:
        raise WorkhorseError("packed documents cannot be cached; decode each in a row of its own")


def _check_tensor(name: str, given: object, shape: str) -> None:
    if not isinstance(given, Tensor):
        raise WorkhorseError(f"{name}={shown(given)} is no tensor; give one of {shape}")


def _check_cache(cache: object) -> None:
    if cache is not None and not isinstance(cache, CacheView):
        raise WorkhorseError(f"cache={shown(cache)} is no Cache; give what new_cache made")


class Runs(NamedTuple):
    """Runs of equal numbers in each row."""

    numbers: Tokens
    """Of the run that each token belongs to."""
    starts: Tokens
    """Where that run begins."""


def number_runs(documents: Tokens) -> Runs:
    """The runs of equal document numbers."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return Runs(first.cumsum(dim=1), torch.where(first, index, 0).cummax(dim=1).values)


def lengths_of_documents(positions: Positions, numbers: Tokens) -> Lengths:
    """Tokens in the document of each token.

    Args:
        positions: in the document.
        numbers: of the documents in each row, from 1.
    """
    ends = positions + 1
    longest = ends.new_zeros(ends.shape[0], ends.shape[1] + 1)
    return longest.scatter_reduce(1, numbers, ends, "amax").gather(1, numbers)

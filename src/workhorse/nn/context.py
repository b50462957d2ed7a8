"""The state shared by the layers of one forward pass: positions, rotations, masks.

The decoder creates a `Context` at each call; modules do not store it. Rotations and masks are
computed when the first layer needs them, and reused by later layers with the same options.
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
    """The state that all layers share in one forward pass over `batch × seq` tokens.

    Args:
        batch: number of rows.
        seq: number of tokens per row.
        device: device of the tokens.
        positions: position of each token, increasing along a row (along a document, with
            `documents`); -1 marks padding. With a cache, they continue from the row's cached
            tokens, without gaps. Default: 0, 1, 2 …, after the cached tokens.
        documents: document id of each token. A run of equal ids is a document: its tokens see only
            each other, and its positions start at 0.
        cache: cache of the earlier tokens; the pass adds the new tokens to it.
        max_positions: number of positions that the model can represent (size of a learned position
            table), or None for no limit.

    Raises:
        WorkhorseError: shapes do not match, there are no tokens, there are more tokens than
            positions, or documents are used with a cache. The cache is then unchanged.
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
        # Default positions are checked by the length; given ones must be read from the device. In
        # a packed pass, the context of each batch checks its own positions.
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
        """Compute `mix(*xs, context, cache)`, separately for each batch of a packed pass.

        Operations in which a token uses other tokens of its sequence need this, such as attention;
        see `CacheView.parts`. In a pass that is not packed, `mix` is called once.

        Args:
            mix: function of tensors (batch, seq, ...), a context and a cache entry; returns a
                tensor (batch, seq, ...).
            xs: the tensors for `mix`, with all batches in one row.
            cache: the layer's cache entry, or None.
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
        """Cosines and sines of `rope` at the positions of this pass, computed once per `name`.

        Different configs must have different names.
        """

        def make() -> tuple[Angles, Angles]:
            alike = self.uniform or not rope.depends_on_length
            length = self.length if alike else self._once("lengths", self._lengths)
            cos, sin = rope.angles(self.positions, head_dim, length)
            return cos.to(dtype), sin.to(dtype)

        return self._once((name, head_dim, dtype), make)

    def mask(self, pattern: AttentionPattern, kernel: Kernel, dtype: torch.dtype) -> Any:
        """The attention mask of a pattern for this pass, in the form that the kernel expects."""

        def make() -> Any:
            place = self.place if self.cache is None else self.cache.place(pattern.reach)
            effective = pattern.within(self.length) if self.uniform else pattern
            return kernel.render(effective, place, dtype)

        return self._once((pattern, type(kernel), dtype), make)

    def slots_before(self, reach: int) -> tuple[Slots, Slots]:
        """`CacheView.slots_before`, computed once per pass."""
        cache = self.cache
        assert cache is not None
        return self._once(("slots_before", reach), lambda: cache.slots_before(reach))

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _lengths(self) -> Lengths:
        """Number of tokens in each row, or in each token's document, without padding.

        Earlier tokens in a cache are counted too.
        """
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
                f"a sequence of {used} tokens does not fit max_seq_len={limit}; shorten it"
            )


def context_alone(x: Hidden, d_model: int, entry: CacheEntry | None = None) -> Context:
    """Create the context of a layer that is called by itself, as in a notebook.

    Raises:
        WorkhorseError: `x` does not have the shape (batch, seq, d_model), or a cache entry is
            given: the caller must then give the context of its cache.
    """
    _check_tensor("x", x, "(batch, seq, d_model)")
    if x.dim() != 3:  # noqa: PLR2004
        raise WorkhorseError(
            f"x has shape {tuple(x.shape)} instead of (batch, seq, d_model); "
            "give a single sequence as x[None]"
        )
    if x.shape[2] != d_model:
        raise WorkhorseError(
            f"x has shape {tuple(x.shape)}, but the layer has d_model={d_model}; give x that width"
        )
    if entry is not None:
        raise WorkhorseError(
            "a cache entry needs its cache's context; give Context(batch, seq, device, cache=cache)"
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
                "give one element per token"
            )
    _check_cache(cache)
    if cache is not None and len(cache.lengths) != shape[0]:
        raise WorkhorseError(
            f"the cache has {len(cache.lengths)} rows, but tokens have {shape[0]}; "
            "create a cache for this batch size"
        )
    if documents is not None and cache is not None:
        raise WorkhorseError(
            "documents cannot be used with a cache; give each document a separate row"
        )


def _check_tensor(name: str, given: object, shape: str) -> None:
    if not isinstance(given, Tensor):
        raise WorkhorseError(f"{name}={shown(given)} is not a tensor; give one of shape {shape}")


def _check_cache(cache: object) -> None:
    if cache is not None and not isinstance(cache, CacheView):
        raise WorkhorseError(f"cache={shown(cache)} is not a cache; create one with new_cache")


class Runs(NamedTuple):
    """Runs of equal document ids in each row."""

    numbers: Tokens
    """For each token, the number of its run, counted from 1 in each row."""
    starts: Tokens
    """For each token, the index of the first token of its run."""


def number_runs(documents: Tokens) -> Runs:
    """Number the runs of equal document ids."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return Runs(first.cumsum(dim=1), torch.where(first, index, 0).cummax(dim=1).values)


def lengths_of_documents(positions: Positions, numbers: Tokens) -> Lengths:
    """Number of tokens in each token's document.

    Args:
        positions: position of each token in its document.
        numbers: for each token, the number of its document, counted from 1 in each row.
    """
    ends = positions + 1
    longest = ends.new_zeros(ends.shape[0], ends.shape[1] + 1)
    return longest.scatter_reduce(1, numbers, ends, "amax").gather(1, numbers)

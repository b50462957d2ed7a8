"""Accounts for every tensor of a foreign checkpoint before any is read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workhorse.errors import WorkhorseError
from workhorse.models.huggingface import Family
from workhorse.models.huggingface.moves import Move, TensorSource, check, plan
from workhorse.models.huggingface.rules import Shape
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.attention.kernels import KernelName

EMBEDDING, HEAD = "embedding.tokens.weight", "head.proj.weight"
WRAPPERS = re.compile(r"^(module\.)+|\b_orig_mod\.")
"""What DistributedDataParallel and `torch.compile` add to the names of tensors."""


@dataclass(frozen=True)
class Account:
    """The source of each of our tensors."""

    moves: list[Move]
    source: TensorSource
    left_out: int
    """Tensors of other parts of a larger model."""
    unwrapped: bool
    """True if names had prefixes of `WRAPPERS`."""


class Renamed:
    """A source under the names that a model has on its own.

    The same model is stored with its own prefix (`model.`), without it, or inside a larger model
    (`language_model.model.`, `model.language_model.`). Prefixes of `WRAPPERS` are dropped.

    Args:
        source: the stored tensors.
        embedding: the family's name for the embedding, by which the prefix is recognised.
    """

    def __init__(self, source: TensorSource, embedding: str) -> None:
        unwrapped = {WRAPPERS.sub("", name): name for name in source.shapes}
        if len(unwrapped) < len(source.shapes):  # two tensors would have one name
            unwrapped = {name: name for name in source.shapes}
        self.unwrapped = any(name != stored for name, stored in unwrapped.items())
        base = embedding.partition(".")[0] + "."
        inside = base + "language_model."
        prefixes = (("", ""), ("", base), (inside, base), ("language_model.", ""))
        found = (
            (old, new)
            for old, new in prefixes
            if embedding.startswith(new) and old + embedding.removeprefix(new) in unwrapped
        )
        self._source = source
        self._old, self._new = next(found, ("", ""))
        text = self._old or base
        self._texts = {self._renamed(name) for name in unwrapped if name.startswith(text)}
        self._stored = {self._renamed(name): stored for name, stored in unwrapped.items()}

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return {name: self._source.shapes[stored] for name, stored in self._stored.items()}

    def read(self, name: str) -> Tensor:
        return self._source.read(self._stored[name])

    def is_text(self, name: str) -> bool:
        """Whether a tensor has the prefix of the text model."""
        return name in self._texts

    def _renamed(self, name: str) -> str:
        if name.startswith("lm_head.") or not name.startswith(self._old):
            return name
        return self._new + name.removeprefix(self._old)


def meta_decoder(
    config: DecoderConfig,
    kernel: KernelName,
    dtype: torch.dtype,
    *,
    n_tensors: int,
    source: str = "config.json",
) -> Decoder:
    """The decoder of an untrusted config, on the meta device: nothing is allocated.

    Args:
        config: the decoder's.
        kernel: how attention is computed.
        dtype: of the weights.
        n_tensors: number of stored tensors, which bounds the number of layers.
        source: the file that the config comes from, for errors.

    Raises:
        WorkhorseError: there can be no such model.
    """
    if config.n_layers > n_tensors:
        raise WorkhorseError(
            f"{source} has {config.n_layers} layers for {n_tensors} tensors; "
            "they are not of one model"
        )
    try:
        return config.build(kernel, device="meta", dtype=dtype)
    except (RuntimeError, OverflowError, MemoryError) as error:
        reason = str(error).splitlines()[0]
        raise WorkhorseError(f"{source} makes no model that can be: {reason}") from None


def shapes_of(decoder: Decoder) -> dict[str, Shape]:
    """The shape of every parameter."""
    return {name: tuple(weight.shape) for name, weight in decoder.named_parameters()}


def account(
    family: Family,
    config: DecoderConfig,
    shapes: Mapping[str, Shape],
    source: TensorSource,
    *,
    wrapped: bool,
) -> Account:
    """Find the source of each of our tensors, and a use of each of theirs.

    Args:
        family: the one whose names the stored tensors have.
        config: the decoder's.
        shapes: of our parameters.
        source: the stored tensors.
        wrapped: whether the text model is part of a larger one, whose other tensors are left out.

    Raises:
        WorkhorseError: a tensor is missing, extra, used twice or misshapen.
    """
    embedding = _their_name(family, EMBEDDING, shapes, config)
    renamed = Renamed(source, embedding)
    stored = renamed.shapes
    moves = plan(family.rules, shapes, config, stored)
    check(moves, shapes, renamed)
    used = [name for move in moves for name in move.theirs]
    if len(used) != len(set(used)):
        twice = next(name for name in used if used.count(name) > 1)
        raise WorkhorseError(
            f"tensor {twice!r} would be read twice; config.json is of another model"
        )
    rest = sorted(set(stored) - set(used))
    if config.head.tied:
        rest = _without_tied_head(rest, family, config, shapes, renamed)
    ignored = re.compile("|".join(family.ignored) or r"(?!)")
    rest = [name for name in rest if not ignored.fullmatch(name)]
    others = [name for name in rest if wrapped and not renamed.is_text(name)]
    rest = [name for name in rest if name not in others]
    if rest:
        more = f" and {len(rest) - 1} more" if len(rest) > 1 else ""
        raise WorkhorseError(
            f"tensor {rest[0]!r}{more} has no place in this {family.model_type} model; "
            "config.json is of another model"
        )
    return Account(moves, renamed, len(others), renamed.unwrapped)


def _their_name(
    family: Family, ours: str, shapes: Mapping[str, Shape], config: DecoderConfig
) -> str:
    return plan(family.rules, {ours: shapes[ours]}, config)[0].theirs[0]


def _without_tied_head(
    rest: list[str],
    family: Family,
    config: DecoderConfig,
    shapes: Mapping[str, Shape],
    source: Renamed,
) -> list[str]:
    """Old files may store a tied head as well; it must equal the embedding."""
    embedding = _their_name(family, EMBEDDING, shapes, config)
    head = _their_name(family, HEAD, {HEAD: shapes[EMBEDDING]}, config)
    if head not in rest:
        return rest
    if not torch.equal(source.read(head), source.read(embedding)):
        raise WorkhorseError(
            f"tie_word_embeddings is true but {head!r} is not {embedding!r}; "
            "set it to false in config.json to keep both"
        )
    return [name for name in rest if name != head]

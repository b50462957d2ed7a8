"""Base classes of self-attention, and the norms and rotations of queries and keys."""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, TypeVar

import torch
from pydantic import Field
from torch import nn

from workhorse.config.base import Config, ConfigError
from workhorse.errors import WorkhorseError
from workhorse.nn.attention.kernels import Kernel, KernelName
from workhorse.nn.attention.masks import AttentionPattern
from workhorse.nn.cache.view import CacheEntry, Layers
from workhorse.nn.context import Context
from workhorse.nn.facts import Divisions
from workhorse.nn.norms import NormConfig, PresentNormConfig
from workhorse.nn.positions.rope import RopeConfig, rotate_half, rotate_interleaved
from workhorse.nn.shapes import Hidden, Queries


class QKNormConfig(Config):
    """Norms on queries and keys (2302.05442 §2), which keep the scores bounded."""

    norm: PresentNormConfig
    """The kind of norm; queries and keys have separate weights."""
    over: Literal["head", "each_head", "full"] = "head"
    """`head` normalises each head, with one weight shared by all heads; `each_head` gives every
    head its own weight (Cohere, StableLM); `full` normalises all heads together (OLMo 2)."""
    after_rope: bool = False
    """Normalise after the rotation (HunYuan) rather than before."""


def norm_then_rotate(x: Queries, norm: nn.Module, rotation: nn.Module, context: Context) -> Queries:
    """Normalise, then rotate queries or keys: the usual order."""
    return rotation(norm(x), context)


def rotate_then_norm(x: Queries, norm: nn.Module, rotation: nn.Module, context: Context) -> Queries:
    """Rotate, then normalise queries or keys: the order of HunYuan and Llama 4."""
    return norm(rotation(x, context))


def make_head_norm(config: QKNormConfig | None, heads: int, head_dim: int) -> nn.Module:
    """Create a norm for queries or keys `(batch, heads, seq, head_dim)`; None: no norm."""
    if config is None:
        return nn.Identity()
    match config.over:
        case "head":
            return config.norm.build(head_dim)
        case "each_head":
            return EachHeadNorm(config.norm, heads, head_dim)
        case "full":
            return AllHeadsNorm(config.norm, heads * head_dim)


class EachHeadNorm(nn.Module):
    """A norm over each head's width, every head with its own weights."""

    division: ClassVar[Divisions] = {"heads": "heads"}

    def __init__(self, config: NormConfig, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(config.build(head_dim) for _ in range(heads))

    def forward(self, x: Queries) -> Queries:
        return torch.stack([norm(x[:, head]) for head, norm in enumerate(self.heads)], dim=1)


class AllHeadsNorm(nn.Module):
    """A norm over all heads' features together."""

    division: ClassVar[Divisions] = {"norm": "features"}

    def __init__(self, config: NormConfig, width: int) -> None:
        super().__init__()
        self.norm = config.build(width)

    def forward(self, x: Queries) -> Queries:
        return split_heads(self.norm(x.transpose(1, 2).flatten(2)), x.shape[1])


Storage = TypeVar("Storage")


class SelfAttentionConfig(Config):
    """Fields that all self-attention configs share."""

    n_heads: int = Field(gt=0)
    """Number of query heads."""
    causal: bool = True
    """True: a query sees only keys up to its own position. False: it sees all, as in an encoder."""
    window: int | None = Field(default=None, gt=0)
    """A query sees only the last `window` positions, including its own."""
    chunk: int | None = Field(default=None, gt=0)
    """A query sees only keys in its own chunk of `chunk` consecutive positions (Llama 4)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the attention weights."""

    def model_post_init(self, _context: object) -> None:
        if not self.causal and (self.window or self.chunk):
            raise ConfigError("causal=false does not support window or chunk; remove them")
        if self.window and self.chunk:
            raise ConfigError(
                f"window={self.window} and chunk={self.chunk} exclude each other; remove one"
            )

    def reach(self) -> AttentionPattern:
        """The pattern of visible keys, without ALiBi's biases."""
        return AttentionPattern(causal=self.causal, window=self.window, chunk=self.chunk)

    @abstractmethod
    def key_dim(self, d_model: int) -> int:
        """Width of a head's queries and keys.

        Raises:
            ConfigError: the width is not a whole number, or RoPE does not support it.
        """

    @abstractmethod
    def build(self, d_model: int, layer: int = 0, kernel: KernelName = "auto") -> "SelfAttention":
        """Build the attention of layer `layer`, counted from 0."""


class SelfAttention(nn.Module, ABC):
    """Base class of self-attention layers.

    Attributes:
        d_model: width of the input and output.
        n_heads: number of query heads.
        head_dim: width of a query and a key in the dot product.
        value_dim: width of a value.
        pattern: attention pattern.
        kernel: attention kernel.
    """

    d_model: int
    n_heads: int
    head_dim: int
    value_dim: int
    pattern: AttentionPattern
    kernel: Kernel
    multiplied_here: ClassVar[tuple[str, ...]] = ()
    """Names of linear submodules whose `weight` this module uses in matmuls of its own. Transforms
    must therefore not replace these submodules, for example by quantised ones."""
    attends_to_stored = True
    """True if the attention kernel gets keys and values exactly as the cache returns them."""
    division: ClassVar[Divisions]
    """How the submodules are divided among ranks by heads; see `workhorse.nn.facts`."""

    @abstractmethod
    def forward(
        self, x: Hidden, context: Context | None = None, cache: CacheEntry | None = None
    ) -> Hidden:
        """Compute attention.

        Args:
            x: the input.
            context: state shared by all layers of the pass. Default: positions 0, 1, 2 … in each
                row, without a cache.
            cache: cache entry with keys and values of earlier tokens. It needs the context that was
                created for its cache.
        """

    def cache_entry(self, cache: Layers[Storage]) -> Storage:
        """Create the storage for this layer's keys and values in a cache; see `Layers.layer`.

        Raises:
            ConfigError: the attention is not causal, so it cannot be cached.
            WorkhorseError: the kernel cannot decode.
        """
        if not self.kernel.decodes:
            raise WorkhorseError(
                "kernel=flex is compiled for one length and cannot decode; use kernel=sdpa or eager"
            )
        if not self.pattern.causal:
            raise ConfigError("causal=false cannot decode with a cache; run the whole sequence")
        return cache.layer(self.pattern.reach, in_blocks=self.kernel.reads_blocks)


def split_heads(x: Hidden, heads: int) -> Queries:
    """Reshape `(batch, seq, heads · width)` to `(batch, heads, seq, width)`."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def make_rotation(rope: RopeConfig, head_dim: int) -> "Rotation":
    """Create the module that applies RoPE to queries or keys of width `head_dim`."""
    kind = Rotation if rope.precision == "native" else Float32Rotation
    return kind(rope, head_dim)


def rotation_precision(module: nn.Module) -> str | None:
    """The precision that a rotation's own class declares, not a base class; None otherwise."""
    return vars(type(module)).get("precision")


class Rotation(nn.Module):
    """Applies RoPE to queries or keys.

    A class declares `precision` if it computes exactly the rotation of its `rope` in it.
    """

    precision: ClassVar[str] = "native"

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        super().__init__()
        self.rope = rope
        self.name = rope.model_dump_json()
        self.head_dim = head_dim
        self.turn = rotate_half if rope.pairing == "half" else rotate_interleaved

    def forward(self, x: Queries, context: Context) -> Queries:
        cos, sin = context.rotation(self.name, self.rope, self.head_dim, x.dtype)
        return self.turn(x, cos, sin)


class Float32Rotation(Rotation):
    """Applies RoPE in float32 and casts the result back to the dtype of the input."""

    precision = "float32"

    def forward(self, x: Queries, context: Context) -> Queries:
        return super().forward(x.float(), context).to(x.dtype)

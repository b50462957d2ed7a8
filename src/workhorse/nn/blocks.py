"""Blocks (decoder layers). They differ in the places of norms and residual additions."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, cast, get_args

from pydantic import Discriminator, Field, Tag
from torch import nn

from workhorse.config.base import Config
from workhorse.nn.attention.grouped import AttentionConfig
from workhorse.nn.attention.kernels import KernelName
from workhorse.nn.attention.latent import LatentAttentionConfig
from workhorse.nn.cache.view import CacheEntry, LayerEntry, Layers
from workhorse.nn.context import Context
from workhorse.nn.convolution import ShortConvolution, ShortConvolutionConfig, SubLayer
from workhorse.nn.elementwise import Multiplier, Sum, Unchanged
from workhorse.nn.experts.mixture import MoEConfig
from workhorse.nn.feedforward import ClampedGatedMlpConfig, GatedMlpConfig, MlpConfig
from workhorse.nn.norms import NormConfig
from workhorse.nn.positions.rope import RopeConfig
from workhorse.nn.shapes import Hidden

Storage = TypeVar("Storage")


def _kind_of_attention(given: Any) -> str | None:
    """The kind of an attention config; a config without a `kind` is `attention`."""
    if isinstance(given, Mapping):
        return cast(Mapping[str, str], given).get("kind", "attention")
    return getattr(given, "kind", None)


AnyAttentionConfig = Annotated[
    Annotated[AttentionConfig, Tag("attention")]
    | Annotated[LatentAttentionConfig, Tag("latent_attention")],
    Discriminator(_kind_of_attention),
]
FeedForwardConfig = Annotated[
    MlpConfig | GatedMlpConfig | ClampedGatedMlpConfig | MoEConfig, Field(discriminator="kind")
]


class WiringConfig(Config):
    """Fields that all block configs share."""

    attention: AnyAttentionConfig
    """The sub-layer that mixes positions; `kind` defaults to `attention`."""
    feed_forward: FeedForwardConfig
    """The sub-layer that processes each position separately."""
    norm: NormConfig
    """The kind of every norm in the block; each has its own weights."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on each sub-layer's output, before the residual addition."""
    residual_multiplier: float = 1.0
    """Factor on each sub-layer's output, before the residual addition (Granite)."""
    convolution: ShortConvolutionConfig | None = None
    """Short convolutions on the inputs of the sub-layers, or None."""

    @property
    def mixture(self) -> MoEConfig | None:
        """The feed-forward config if it is a mixture of experts, otherwise None."""
        return self.feed_forward if isinstance(self.feed_forward, MoEConfig) else None

    @property
    def grouped(self) -> AttentionConfig | None:
        """The attention config, or None if it is a config of latent attention."""
        return self.attention if isinstance(self.attention, AttentionConfig) else None

    @property
    def rope(self) -> RopeConfig | None:
        """The rotary position config of the attention, or None."""
        position = self.attention.position
        return position if isinstance(position, RopeConfig) else None

    @abstractmethod
    def build(self, d_model: int, layer: int = 0, kernel: KernelName = "auto") -> "Block":
        """Build the block of layer `layer`, counted from 0."""


class Block(nn.Module, ABC):
    """A decoder layer: attention over positions, and a feed-forward at each position.

    Args:
        config: the config of the block.
        d_model: width of the residual stream.
        layer: index of the layer, from 0; used by attention with `scale_by_layer`.
        kernel: name of the attention kernel.
    """

    def __init__(
        self, config: WiringConfig, d_model: int, layer: int = 0, kernel: KernelName = "auto"
    ) -> None:
        super().__init__()
        self.attention = config.attention.build(d_model, layer, kernel)
        self.feed_forward = config.feed_forward.build(d_model)
        self.attention_branch = make_branch(config.dropout, config.residual_multiplier)
        self.feed_forward_branch = make_branch(config.dropout, config.residual_multiplier)
        short = config.convolution
        self.attention_convolution, self.feed_forward_convolution = (
            short.build(d_model) if short and name in short.before else Unchanged()
            for name in get_args(SubLayer)
        )

    @abstractmethod
    def forward(
        self, x: Hidden, context: Context | None = None, cache: CacheEntry | None = None
    ) -> Hidden:
        """Return the residual stream after this layer."""

    def attend(self, x: Hidden, context: Context | None, cache: CacheEntry | None) -> Hidden:
        """Apply the short convolution, if there is one, and the attention."""
        entry = cache.inputs.get("attention") if cache else None
        return self.attention(self.attention_convolution(x, context, entry), context, cache)

    def feed(self, x: Hidden, context: Context | None, cache: CacheEntry | None) -> Hidden:
        """Apply the short convolution, if there is one, and the feed-forward."""
        entry = cache.inputs.get("feed_forward") if cache else None
        return self.feed_forward(self.feed_forward_convolution(x, context, entry))

    def cache_stores(self, cache: Layers[Storage]) -> list[Storage]:
        """Create this layer's storage in a cache: for the attention, then for each convolution.

        Each element is a cache entry, or a store of a paged cache; see `Layers.layer`.

        Raises:
            ConfigError: the attention is not causal, so it cannot be cached.
            WorkhorseError: the kernel cannot decode.
        """
        short = [cache.layer(part.width) for part in self.convolutions().values()]
        return [self.attention.cache_entry(cache), *short]

    def entry(self, entries: Iterator[CacheEntry]) -> CacheEntry:
        """Take this layer's cache entries from an iterator and combine them into one entry.

        Args:
            entries: the entries of this and later layers, in the order of `cache_stores`.
        """
        attention = next(entries)
        inputs = {name: next(entries) for name in self.convolutions()}
        return LayerEntry(attention, inputs) if inputs else attention

    def convolutions(self) -> dict[str, ShortConvolution]:
        """The short convolutions of this layer, by the sub-layer whose input they change."""
        parts = {
            "attention": self.attention_convolution,
            "feed_forward": self.feed_forward_convolution,
        }
        return {name: one for name, one in parts.items() if isinstance(one, ShortConvolution)}


class PreNormConfig(WiringConfig):
    """`x + f(norm(x))` for each sub-layer: GPT-2, LLaMA. Paper: 2002.04745."""

    kind: Literal["pre_norm"] = "pre_norm"
    norm_residual: bool = False
    """Add each sub-layer's output to the normalised input, not to the input (BLOOM option)."""
    norm_attention: bool = True
    """False omits the norm before the attention. The first layer of ModernBERT-decoder does so,
    because the embedding's output is already normalised."""

    def build(self, d_model: int, layer: int = 0, kernel: KernelName = "auto") -> Block:
        kind = NormedResidual if self.norm_residual else PreNorm
        block = kind(self, d_model, layer, kernel)
        if not self.norm_attention:
            block.attention_norm = nn.Identity()
        return block


class PreNorm(Block):
    """`x + attention(norm(x))`, then `x + feed_forward(norm(x))`."""

    def __init__(
        self, config: WiringConfig, d_model: int, layer: int = 0, kernel: KernelName = "auto"
    ) -> None:
        super().__init__(config, d_model, layer, kernel)
        self.attention_norm = config.norm.build(d_model)
        self.feed_forward_norm = config.norm.build(d_model)
        self.attention_sum = Sum()
        self.feed_forward_sum = Sum()

    def forward(
        self, x: Hidden, context: Context | None = None, cache: CacheEntry | None = None
    ) -> Hidden:
        y = self.attention_branch(self.attend(self.attention_norm(x), context, cache))
        x = self.attention_sum(x, y)
        y = self.feed_forward_branch(self.feed(self.feed_forward_norm(x), context, cache))
        return self.feed_forward_sum(x, y)


class NormedResidual(PreNorm):
    """`norm(x) + attention(norm(x))`, then `norm(x) + feed_forward(norm(x))`."""

    def forward(
        self, x: Hidden, context: Context | None = None, cache: CacheEntry | None = None
    ) -> Hidden:
        x = self.attention_norm(x)
        x = self.attention_sum(x, self.attention_branch(self.attend(x, context, cache)))
        x = self.feed_forward_norm(x)
        return self.feed_forward_sum(x, self.feed_forward_branch(self.feed(x, context, cache)))


class PostNormConfig(WiringConfig):
    """`norm(x + f(x))` for each sub-layer: the 2017 transformer and GPT (1706.03762 §3.1)."""

    kind: Literal["post_norm"] = "post_norm"

    def build(self, d_model: int, layer: int = 0, kernel: KernelName = "auto") -> Block:
        return PostNorm(self, d_model, layer, kernel)


class PostNorm(PreNorm):
    """`norm(x + attention(x))`, then `norm(x + feed_forward(x))`."""

    def forward(
        self, x: Hidden, context: Context | None = None, cache: CacheEntry | None = None
    ) -> Hidden:
        y = self.attention_branch(self.attend(x, context, cache))
        x = self.attention_norm(self.attention_sum(x, y))
        y = self.feed_forward_branch(self.feed(x, context, cache))
        return self.feed_forward_norm(self.feed_forward_sum(x, y))


class ReorderedNormConfig(WiringConfig):
    """`x + norm(f(x))` for each sub-layer: OLMo 2 (2501.00656 §2.1)."""

    kind: Literal["reordered_norm"] = "reordered_norm"

    def build(self, d_model: int, layer: int = 0, kernel: KernelName = "auto") -> Block:
        return ReorderedNorm(self, d_model, layer, kernel)


class ReorderedNorm(PreNorm):
    """`x + norm(attention(x))`, then `x + norm(feed_forward(x))`."""

    def forward(
        self, x: Hidden, context: Context | None = None, cache: CacheEntry | None = None
    ) -> Hidden:
        y = self.attention_branch(self.attention_norm(self.attend(x, context, cache)))
        x = self.attention_sum(x, y)
        y = self.feed_forward_branch(self.feed_forward_norm(self.feed(x, context, cache)))
        return self.feed_forward_sum(x, y)


class SandwichNormConfig(WiringConfig):
    """`x + norm(f(norm(x)))` for each sub-layer: Gemma 2 (2408.00118 §2)."""

    kind: Literal["sandwich_norm"] = "sandwich_norm"

    def build(self, d_model: int, layer: int = 0, kernel: KernelName = "auto") -> Block:
        return SandwichNorm(self, d_model, layer, kernel)


class SandwichNorm(PreNorm):
    """`x + norm(attention(norm(x)))`, then `x + norm(feed_forward(norm(x)))`."""

    def __init__(
        self, config: WiringConfig, d_model: int, layer: int = 0, kernel: KernelName = "auto"
    ) -> None:
        super().__init__(config, d_model, layer, kernel)
        self.attention_output_norm = config.norm.build(d_model)
        self.feed_forward_output_norm = config.norm.build(d_model)

    def forward(
        self, x: Hidden, context: Context | None = None, cache: CacheEntry | None = None
    ) -> Hidden:
        y = self.attend(self.attention_norm(x), context, cache)
        x = self.attention_sum(x, self.attention_branch(self.attention_output_norm(y)))
        y = self.feed(self.feed_forward_norm(x), context, cache)
        y = self.feed_forward_branch(self.feed_forward_output_norm(y))
        return self.feed_forward_sum(x, y)


class ParallelConfig(WiringConfig):
    """`x + attention(norm(x)) + feed_forward(norm(x))`: both sub-layers have the same input x.

    GPT-J, PaLM (2204.02311 §2) and Falcon-7B share one norm; GPT-NeoX and Falcon-40B have two.
    """

    kind: Literal["parallel"] = "parallel"
    norms: Literal[1, 2] = 1
    """1: one norm for both sub-layers (GPT-J, PaLM); 2: one for each (GPT-NeoX)."""

    def build(self, d_model: int, layer: int = 0, kernel: KernelName = "auto") -> Block:
        block = Parallel if self.norms == 1 else ParallelTwoNorms
        return block(self, d_model, layer, kernel)


class Parallel(Block):
    """`x + attention(norm(x)) + feed_forward(norm(x))` with one norm."""

    def __init__(
        self, config: WiringConfig, d_model: int, layer: int = 0, kernel: KernelName = "auto"
    ) -> None:
        super().__init__(config, d_model, layer, kernel)
        self.norm = config.norm.build(d_model)
        self.sum = Sum()

    def forward(
        self, x: Hidden, context: Context | None = None, cache: CacheEntry | None = None
    ) -> Hidden:
        y = self.norm(x)
        mixed = self.attention_branch(self.attend(y, context, cache))
        return self.sum(x, mixed + self.feed_forward_branch(self.feed(y, context, cache)))


class ParallelTwoNorms(Block):
    """`x + attention(norm₁(x)) + feed_forward(norm₂(x))`."""

    def __init__(
        self, config: WiringConfig, d_model: int, layer: int = 0, kernel: KernelName = "auto"
    ) -> None:
        super().__init__(config, d_model, layer, kernel)
        self.attention_norm = config.norm.build(d_model)
        self.feed_forward_norm = config.norm.build(d_model)
        self.sum = Sum()

    def forward(
        self, x: Hidden, context: Context | None = None, cache: CacheEntry | None = None
    ) -> Hidden:
        mixed = self.attention_branch(self.attend(self.attention_norm(x), context, cache))
        y = self.feed_forward_branch(self.feed(self.feed_forward_norm(x), context, cache))
        return self.sum(x, mixed + y)


BlockConfig = Annotated[
    PreNormConfig | PostNormConfig | ReorderedNormConfig | SandwichNormConfig | ParallelConfig,
    Field(discriminator="kind"),
]


def make_branch(dropout: float, multiplier: float) -> nn.Module:
    """Build the dropout and multiplier on a sub-layer's output, before the residual addition."""
    if multiplier == 1.0:
        return nn.Dropout(dropout) if dropout else nn.Identity()
    return nn.Sequential(nn.Dropout(dropout), Multiplier(multiplier))

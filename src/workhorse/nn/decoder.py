"""The decoder: token embedding, a stack of blocks, a final norm and a head."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from workhorse.config.base import Config, ConfigError
from workhorse.errors import nearest
from workhorse.nn.attention.kernels import KernelName
from workhorse.nn.blocks import Block, BlockConfig
from workhorse.nn.cache.paged import PagedCache, check_sizes
from workhorse.nn.cache.paged_view import PagedView
from workhorse.nn.cache.view import CacheView, Layers
from workhorse.nn.context import Context
from workhorse.nn.embedding import EmbeddingConfig, HeadConfig, batch_and_seq
from workhorse.nn.init import (
    InitConfig,
    NormalInitConfig,
    initial_weights,
    initialize,
    undrawn,
)
from workhorse.nn.norms import NoNormConfig, NormConfig
from workhorse.nn.positions.absolute import OF_PARTS, LearnedPositionConfig
from workhorse.nn.shapes import Hidden, Logits, NextLogits, Positions, Tokens

Storage = TypeVar("Storage")


class DecoderConfig(Config):
    """A whole decoder-only transformer.

    `blocks` defines the layers by name. `pattern` gives their order: one name per layer, or fewer
    names that are repeated to fill `n_layers`. With only one block, omit `pattern`.
    """

    elsewhere = OF_PARTS
    vocab_size: int = Field(gt=0)
    """Number of distinct tokens, which is also the number of logits per position."""
    d_model: int = Field(gt=0)
    """Width of the residual stream."""
    n_layers: int = Field(gt=0, le=100_000)
    """Depth: the number of blocks."""
    max_seq_len: int = Field(gt=0)
    """Maximum sequence length, in tokens: the size of a learned position table, and the limit in
    training and generation."""
    embedding: EmbeddingConfig = EmbeddingConfig()
    """How tokens become vectors."""
    blocks: dict[str, BlockConfig]
    """The configs of the different layers, each under a name of your choice."""
    pattern: tuple[str, ...] = ()
    """Names of blocks, repeated over the layers: `[local, local, global]` applies to layers 0, 1
    and 2, then to 3, 4 and 5, and so on. May be omitted if there is one block."""
    final_norm: NormConfig = NoNormConfig()
    """The norm on the residual stream before the head."""
    head: HeadConfig = HeadConfig()
    """How vectors become logits."""
    init: InitConfig = NormalInitConfig()
    """How weights are initialised."""

    def model_post_init(self, _context: object) -> None:
        if not self.blocks:
            raise ConfigError("no block is defined; define at least one", "blocks")
        if not self.pattern and len(self.blocks) > 1:
            raise ConfigError(
                f"required with {len(self.blocks)} blocks; list their names in order", "pattern"
            )
        if len(self.pattern) > self.n_layers:
            raise ConfigError(
                f"{len(self.pattern)} names are more than n_layers={self.n_layers}; remove some",
                "pattern",
            )
        for name in self.pattern:
            if name not in self.blocks:
                raise ConfigError(f"no block {name!r}; {nearest(name, self.blocks)}", "pattern")
        if self.head.tied and self.init.head == "zero":
            raise ConfigError(
                "zero would also zero the tied embedding; set head.tied=false",
                "init.head",
            )
        for name, block in self.blocks.items():
            if name not in self.layer_names():
                raise ConfigError("no layer uses this block; remove it", f"blocks.{name}")
            try:
                block.attention.key_dim(self.d_model)
            except ConfigError as error:
                raise ConfigError(error.reason, f"blocks.{name}.attention") from None

    def layer_names(self) -> list[str]:
        """For each layer, in order, the name of its config in `blocks`."""
        names = self.pattern or tuple(self.blocks)
        return [names[layer % len(names)] for layer in range(self.n_layers)]

    def steady_length(self) -> int:
        """Length, in tokens, up to which a growing sequence keeps its RoPE angles.

        It is `max_seq_len`, or less with a RoPE scaling that depends on the sequence length.
        """
        ropes = (block.rope for block in self.blocks.values())
        limits = [rope.steady_length for rope in ropes if rope is not None]
        return min([self.max_seq_len, *(limit for limit in limits if limit is not None)])

    def build(
        self,
        kernel: KernelName = "auto",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "Decoder":
        """Build a decoder with fresh weights.

        Args:
            kernel: name of the attention kernel of every layer.
            device: device of the weights; default: PyTorch's default device. On `meta`, nothing is
                allocated.
            dtype: dtype of the weights.

        Raises:
            WorkhorseError: the kernel does not support this config.
        """
        device = torch.get_default_device() if device is None else torch.device(device)
        with torch.device(device), undrawn(dtype):
            decoder = Decoder(self, kernel)
        return decoder if device.type == "meta" else decoder.initialize()

    def draw(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and value of each fresh weight that `build` would create on `device`."""
        with torch.device("meta"), undrawn(torch.float32, discard_on=device):
            decoder = Decoder(self)
        return initial_weights(decoder, self.init, self.n_layers, device)


class Decoder(nn.Module):
    """A decoder-only transformer: maps token ids to logits.

    Args:
        config: the config of the decoder.
        kernel: name of the attention kernel.
    """

    def __init__(self, config: DecoderConfig, kernel: KernelName = "auto") -> None:
        super().__init__()
        self.config = config
        self.max_seq_len = config.max_seq_len
        learned = isinstance(config.embedding.position, LearnedPositionConfig)
        self.max_positions = config.max_seq_len if learned else None
        self.embedding = config.embedding.build(
            config.vocab_size, config.d_model, config.max_seq_len
        )
        self.layers = nn.ModuleList(
            config.blocks[name].build(config.d_model, layer, kernel)
            for layer, name in enumerate(config.layer_names())
        )
        self.final_norm = config.final_norm.build(config.d_model)
        self.head = config.head.build(config.vocab_size, config.d_model, self.embedding.width)
        self.tie_weights()

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.parameters()).device

    def forward(
        self,
        tokens: Tokens,
        *,
        positions: Positions | None = None,
        documents: Tokens | None = None,
        cache: CacheView | None = None,
    ) -> Logits:
        """Logits of the next token at every position; see `Context` for the arguments."""
        return self.unembed(
            self.hidden(tokens, positions=positions, documents=documents, cache=cache)
        )

    def hidden(
        self,
        tokens: Tokens,
        *,
        positions: Positions | None = None,
        documents: Tokens | None = None,
        cache: CacheView | None = None,
    ) -> Hidden:
        """The residual stream after the final norm, which is the input of the head.

        For the arguments see `Context`.
        """
        batch, seq = batch_and_seq(tokens)
        context = Context(
            batch,
            seq,
            tokens.device,
            positions=positions,
            documents=documents,
            cache=cache,
            max_positions=self.max_positions,
        )
        x = self.embedding(tokens, context.positions)
        entries = None if cache is None else iter(cache.entries)
        for layer in self._blocks():
            # `if entries` would empty the iterator in PyTorch 2.11's compiler.
            x = layer(x, context, None if entries is None else layer.entry(entries))
        return self.final_norm(x)

    def unembed(self, x: Hidden) -> Logits:
        """Map hidden states to logits; pass only the positions whose logits are needed."""
        return self.head(x)

    def next_logits(
        self, tokens: Tokens, *, positions: Positions | None = None, cache: CacheView | None = None
    ) -> NextLogits:
        """Logits of the token after the last position, `(batch, vocab)`."""
        return self.unembed(self.hidden(tokens, positions=positions, cache=cache)[:, -1:])[:, 0]

    def new_cache(self, batch: int, capacity: int, slack: int = 0) -> PagedView:
        """Create an empty cache for `batch` sequences of up to `capacity` tokens each.

        Args:
            batch: number of rows.
            capacity: maximum number of tokens per row.
            slack: number of newest tokens that `PagedView.truncate` can always remove.

        Raises:
            WorkhorseError: a size is not a whole number in range, the cache does not fit into
                memory, or the attention is not causal.
        """
        check_sizes(batch=batch, capacity=capacity, slack=slack)
        cache = PagedCache(batch * capacity, batch, self.device, capacity, slack)
        cache.stores = self.cache_stores(cache)
        return PagedView(cache, [cache.new_sequence() for _ in range(batch)], capacity)

    def cache_stores(self, cache: Layers[Storage]) -> list[Storage]:
        """Create the storage of all layers in a cache, in order; see `Block.cache_stores`."""
        return [store for layer in self._blocks() for store in layer.cache_stores(cache)]

    def new_paged_cache(self, tokens: int, sequences: int, slack: int = 0) -> PagedCache:
        """Create an empty cache for sequences that are added and removed independently.

        Args:
            tokens: maximum number of tokens of all sequences together.
            sequences: maximum number of sequences at a time.
            slack: number of a sequence's newest tokens that `PagedCache.truncate` can always
                remove.

        Raises:
            WorkhorseError: the cache would have no slots, or the attention is not causal.
        """
        cache = PagedCache(tokens, sequences, self.device, self.max_seq_len, slack)
        cache.stores = self.cache_stores(cache)
        return cache

    def initialize(self, generator: torch.Generator | None = None) -> "Decoder":
        """Initialise every weight again, in place, by the config's scheme."""
        initialize(self, self.config.init, self.config.n_layers, generator)
        return self

    def tie_weights(self) -> None:
        """Make the head share the embedding's matrix if the config ties them."""
        if self.config.head.tied:
            self.head.proj.weight = self.embedding.tokens.weight

    def _blocks(self) -> list[Block]:
        return cast(list[Block], list(self.layers))


def decoders_in(root: nn.Module) -> list[Decoder]:
    """The decoders in a module tree, such as an objective."""
    return [part for part in root.modules() if isinstance(part, Decoder)]


@contextmanager
def evaluation_mode(decoder: Decoder) -> Generator[None]:
    """Context manager that turns dropout off, and restores the decoder's mode afterwards."""
    if not decoder.training:
        yield
        return
    decoder.eval()
    try:
        yield
    finally:
        decoder.train()

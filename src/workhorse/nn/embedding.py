"""The token embedding and the output head of a decoder."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from workhorse.config.base import Config, ConfigError
from workhorse.errors import WorkhorseError, shown
from workhorse.nn.elementwise import Multiplier, RoundedMultiplier, SoftCap
from workhorse.nn.facts import Divisions
from workhorse.nn.feedforward import ActivationName, make_activation
from workhorse.nn.norms import NoNormConfig, NormConfig
from workhorse.nn.positions.absolute import (
    OF_THE_ATTENTION,
    EmbeddingPositionConfig,
    NoPositionConfig,
)
from workhorse.nn.shapes import Hidden, Logits, Positions, Tokens


class EmbeddingConfig(Config):
    """Token embedding: `dropout(norm(multiplier · project(table[token])) + position)`."""

    elsewhere = OF_THE_ATTENTION
    position: EmbeddingPositionConfig = NoPositionConfig()
    """Positions added to the token vectors; rotations and ALiBi are options of the attention."""
    width: int | None = Field(default=None, gt=0)
    """Width of the table if it is not d_model; a projection maps its rows to d_model (OPT-350m)."""
    multiplier: float = 1.0
    """Factor on the token vectors (Gemma and the 2017 transformer: sqrt(d_model))."""
    round_multiplier: bool = False
    """Round the multiplier to the table's dtype first (Gemma): in bfloat16 sqrt(3072) is 55.5."""
    norm: NormConfig = NoNormConfig()
    """A norm on the token vectors (BLOOM)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the sum of token and position vectors."""

    def model_post_init(self, _context: object) -> None:
        if self.round_multiplier and self.multiplier == 1:
            raise ConfigError(
                "round_multiplier=true has no effect with multiplier=1; set multiplier"
            )

    def multiply(self) -> nn.Module:
        """Create the module that multiplies token vectors by the multiplier."""
        if self.multiplier == 1:
            return nn.Identity()
        kind = RoundedMultiplier if self.round_multiplier else Multiplier
        return kind(self.multiplier)

    def build(self, vocab_size: int, d_model: int, max_seq_len: int) -> "Embedding":
        return Embedding(self, vocab_size, d_model, max_seq_len)


TYPES_OF_IDS = {torch.int64, torch.int32}


def batch_and_seq(tokens: object) -> tuple[int, int]:
    """The batch size and sequence length of a batch of tokens.

    Raises:
        WorkhorseError: `tokens` is not a two-dimensional tensor of ids.
    """
    if not isinstance(tokens, Tensor):
        raise WorkhorseError(
            f"tokens={shown(tokens)} is not a tensor (batch, seq); give torch.tensor([ids])"
        )
    if tokens.dtype not in TYPES_OF_IDS:
        raise WorkhorseError(f"tokens have dtype {tokens.dtype}; give ids in torch.int64 or int32")
    if tokens.dim() != 2:  # noqa: PLR2004
        raise WorkhorseError(
            f"tokens have shape {tuple(tokens.shape)} instead of (batch, seq); "
            "give a single sequence as tokens[None]"
        )
    return tokens.shape[0], tokens.shape[1]


def look_up(table: nn.Embedding, tokens: Tokens) -> Hidden:
    """Look up the vectors of token ids.

    Raises:
        WorkhorseError: an id is outside the table.
    """
    try:
        return table(tokens)
    except IndexError:
        raise WorkhorseError(
            f"token ids range from {int(tokens.min())} to {int(tokens.max())}; "
            f"vocab_size={table.num_embeddings} allows ids from 0 to {table.num_embeddings - 1}"
        ) from None


class Embedding(nn.Module):
    """Maps tokens `(batch, seq)` to vectors `(batch, seq, d_model)`.

    Attributes:
        width: width of the embedding table, which a tied head also uses.
    """

    division: ClassVar[Divisions] = {"tokens": "vocabulary"}

    def __init__(
        self, config: EmbeddingConfig, vocab_size: int, d_model: int, max_seq_len: int
    ) -> None:
        super().__init__()
        self.width = config.width or d_model
        narrow = self.width != d_model
        self.tokens = nn.Embedding(vocab_size, self.width)
        self.project = nn.Linear(self.width, d_model, bias=False) if narrow else nn.Identity()
        self.multiply = config.multiply()
        self.norm = config.norm.build(d_model)
        self.positions = config.position.build(max_seq_len, d_model)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(self, tokens: Tokens, positions: Positions) -> Hidden:
        x = self.norm(self.multiply(self.project(look_up(self.tokens, tokens))))
        return self.dropout(self.positions(x, positions))


class HeadTransformConfig(Config):
    """A dense layer, an activation and a norm before the logits (ModernBERT-decoder)."""

    activation: ActivationName = "gelu"
    """Activation after the dense layer."""
    bias: bool = False
    """A bias on the dense layer."""
    norm: NormConfig
    """The norm after the activation."""

    def build(self, d_model: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(d_model, d_model, bias=self.bias),
            make_activation(self.activation),
            self.norm.build(d_model),
        )


class HeadConfig(Config):
    """Output head: `cap(multiplier · (transform(x) Wᵀ + bias))`."""

    tied: bool = False
    """Use the matrix of the token embedding to compute the logits."""
    bias: bool = False
    """A learned bias on each logit."""
    multiplier: float = 1.0
    """Factor on the logits (PaLM: 1/sqrt(d_model))."""
    cap: float | None = Field(default=None, gt=0)
    """Limit the logits smoothly to ±cap: `cap · tanh(logits / cap)` (Gemma 2)."""
    transform: HeadTransformConfig | None = None
    """A dense layer, an activation and a norm before the logits, or None."""

    def build(self, vocab_size: int, d_model: int, width: int) -> "Head":
        return Head(self, vocab_size, d_model, width)


class Head(nn.Module):
    """Maps vectors `(batch, seq, d_model)` to logits `(batch, seq, vocab)`.

    Attributes:
        linear: True if losses may compute the logits from the head's submodules, without calling
            `forward`. It does not apply to a subclass that overrides `forward`, unless the subclass
            sets it again.

    Args:
        config: options of the head.
        vocab_size: number of logits.
        d_model: width of the input.
        width: width of the embedding; if it is not d_model, the input is first projected to it.
    """

    linear = True
    division: ClassVar[Divisions] = {"proj": "vocabulary"}

    def __init__(self, config: HeadConfig, vocab_size: int, d_model: int, width: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.transform = config.transform.build(d_model) if config.transform else nn.Identity()
        narrow = width != d_model
        self.project = nn.Linear(d_model, width, bias=False) if narrow else nn.Identity()
        self.proj = nn.Linear(width, vocab_size, bias=config.bias)
        self.multiply = Multiplier(config.multiplier) if config.multiplier != 1 else nn.Identity()
        self.cap = SoftCap(config.cap) if config.cap else nn.Identity()

    def forward(self, x: Hidden) -> Logits:
        return self.cap(self.multiply(self.proj(self.project(self.transform(x)))))


def heads_in(root: nn.Module) -> list[Head]:
    """The heads in a module tree, such as an objective and its teacher."""
    return [part for part in root.modules() if isinstance(part, Head)]

"""Vectors to logits."""

from pydantic import Field
from torch import nn

from workhorse.config.base import Config
from workhorse.nn.elementwise import Multiplier, SoftCap
from workhorse.nn.feedforward import ActivationName, make_activation
from workhorse.nn.norms import NormConfig
from workhorse.nn.shapes import Hidden, Logits


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
    """`cap(multiplier · (transform(x) Wᵀ + bias))`."""

    tied: bool = False
    """Share the embedding's matrix."""
    bias: bool = False
    """A learned bias on each logit."""
    multiplier: float = 1.0
    """Factor on the logits (PaLM: 1/sqrt(d_model))."""
    cap: float | None = Field(default=None, gt=0)
    """Soft-cap the logits at plus and minus this: `cap · tanh(logits / cap)` (Gemma 2)."""
    transform: HeadTransformConfig | None = None
    """A dense layer, an activation and a norm before the logits; left out: none of them."""

    def build(self, vocab_size: int, d_model: int, width: int) -> "Head":
        return Head(self, vocab_size, d_model, width)


class Head(nn.Module):
    """`(batch, seq, d_model)` to `(batch, seq, vocab)`.

    Args:
        config: its options.
        vocab_size: number of logits.
        d_model: width of the input.
        width: of the embedding; if it is not d_model, the input is first projected to it.
    """

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

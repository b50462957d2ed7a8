"""Normalisation over the last axis, the features."""

from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from workhorse.config.base import Config, ConfigError
from workhorse.nn.products import autocast_dtype, without_autocast


class LayerNormConfig(Config):
    """`(x - mean) / sqrt(var + eps) * weight + bias`, with the biased variance.

    Paper: Layer Normalization, 1607.06450.
    """

    kind: Literal["layer_norm"] = "layer_norm"
    eps: float = Field(default=1e-5, gt=0, le=1)
    """Added to the variance, inside the square root."""
    weight: bool = True
    """A learned factor per feature."""
    bias: bool = True
    """A learned bias per feature, added last."""
    offset: bool = False
    """Store the weight as its difference from 1 (Nemotron), so that weight decay pulls it to 1."""
    precision: Literal["native", "float32", "low"] = "native"
    """`native` is PyTorch's LayerNorm. `float32` computes in float32 for every input dtype (OLMo).
    `low` computes in the autocast dtype (MPT); this is faster but was observed to cause rare loss
    spikes. If input and weights are bfloat16, all three compute sums in float32 and return
    bfloat16."""

    def build(self, width: int) -> "LayerNorm":
        kinds = {"native": LayerNorm, "float32": Float32LayerNorm, "low": LowPrecisionLayerNorm}
        return kinds[self.precision](
            width, eps=self.eps, weight=self.weight, bias=self.bias, offset=self.offset
        )

    def model_post_init(self, _context: object) -> None:
        if self.offset and not self.weight:
            raise ConfigError("offset=true needs a weight; set weight=true or offset=false")


class NormFacts(NamedTuple):
    """Properties of a norm class that native operators and sharded layers need to compute it."""

    centred: bool
    """True if the norm subtracts the mean."""
    rounds_normal: bool = False
    """True if the normalised value is rounded to the input's dtype before the weight multiplies
    it."""
    rounds_gain: bool = True
    """True if the sum of weight and offset is rounded to the input's dtype."""


class Norm(nn.Module):
    """`normalised(x) * (offset + weight) + bias` over the last axis.

    A class declares `facts` if they describe its computation exactly. Native operators may then
    compute the norm without calling the module. Inherited `facts` are ignored, because a subclass
    may compute something else.
    """

    facts: ClassVar[NormFacts]
    eps: float
    offset: float
    weight: nn.Parameter | None
    bias: nn.Parameter | None


def norm_facts(module: nn.Module) -> NormFacts | None:
    """The `NormFacts` that a module's own class declares, not a base class; None otherwise."""
    return vars(type(module)).get("facts")


class LayerNorm(Norm):
    """`(x - mean) / sqrt(var + eps) * weight + bias` over the last axis."""

    facts = NormFacts(centred=True)

    def __init__(
        self,
        width: int,
        *,
        eps: float = 1e-5,
        weight: bool = True,
        bias: bool = True,
        offset: bool = False,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.offset = float(offset)
        self.weight = nn.Parameter(torch.empty(width)) if weight else None
        self.bias = nn.Parameter(torch.empty(width)) if bias else None
        self.width = width
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _reset(self.weight, 1.0 - self.offset)
        _reset(self.bias, 0.0)

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        weight = _gain(self.weight, self.offset)
        return F.layer_norm(x, (self.width,), weight, self.bias, self.eps)


class Float32LayerNorm(LayerNorm):
    """LayerNorm computed in float32 and cast back (OLMo, 2402.00838)."""

    facts = LayerNorm.facts

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        weight = _gain(self.weight, self.offset)
        return F.layer_norm(
            x.float(),
            (self.width,),
            None if weight is None else weight.float(),
            None if self.bias is None else self.bias.float(),
            self.eps,
        ).to(x.dtype)


class LowPrecisionLayerNorm(LayerNorm):
    """LayerNorm in the autocast dtype rather than in float32 (MPT)."""

    facts = LayerNorm.facts

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        low = autocast_dtype(x) or x.dtype
        weight = _gain(self.weight, self.offset)
        with without_autocast(x):
            return F.layer_norm(
                x.to(low),
                (self.width,),
                None if weight is None else weight.to(low),
                None if self.bias is None else self.bias.to(low),
                self.eps,
            )


class RMSNormConfig(Config):
    """`x / sqrt(mean(x²) + eps) * weight`, the mean in float32.

    Paper: Root Mean Square Layer Normalization, 1910.07467.
    """

    kind: Literal["rms_norm"] = "rms_norm"
    eps: float = Field(default=1e-6, gt=0, le=1)
    """Added to the mean square, inside the square root."""
    weight: bool = True
    """A learned factor per feature."""
    offset: bool = False
    """Store the weight as its difference from 1 (Gemma)."""
    multiply: Literal["after_cast", "before_cast"] = "after_cast"
    """Multiply by the weight after the cast back from float32 (LLaMA) or before it (OLMo 2, Gemma).
    The results are the same if the input is float32."""

    def build(self, width: int) -> "RMSNorm":
        norm = RMSNorm if self.multiply == "after_cast" else RMSNormMultipliedFirst
        return norm(width, eps=self.eps, weight=self.weight, offset=self.offset)

    def model_post_init(self, _context: object) -> None:
        if self.offset and not self.weight:
            raise ConfigError("offset=true needs a weight; set weight=true or offset=false")


class RMSNorm(Norm):
    """`x / sqrt(mean(x²) + eps) * weight` over the last axis."""

    facts = NormFacts(centred=False, rounds_normal=True)

    def __init__(
        self, width: int, *, eps: float = 1e-6, weight: bool = True, offset: bool = False
    ) -> None:
        super().__init__()
        self.eps = eps
        self.offset = float(offset)
        self.weight = nn.Parameter(torch.empty(width)) if weight else None
        self.bias = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _reset(self.weight, 1.0 - self.offset)

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        return self.multiply(self.normalise(x).to(x.dtype))

    def normalise(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    def multiply(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        weight = self.weight
        return x if weight is None else x * (weight.to(x.dtype) + self.offset)


class RMSNormMultipliedFirst(RMSNorm):
    """RMSNorm that multiplies in float32 and casts last (OLMo 2, Gemma)."""

    facts = NormFacts(centred=False, rounds_gain=False)

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        return self.multiply(self.normalise(x)).to(x.dtype)


class NoNormConfig(Config):
    """No normalisation: the original GPT has none before its head."""

    kind: Literal["none"] = "none"

    def build(self, width: int) -> nn.Module:
        del width
        return nn.Identity()


PresentNormConfig = Annotated[LayerNormConfig | RMSNormConfig, Field(discriminator="kind")]
NormConfig = Annotated[LayerNormConfig | RMSNormConfig | NoNormConfig, Field(discriminator="kind")]


def _reset(parameter: nn.Parameter | None, value: float) -> None:
    if parameter is not None:
        nn.init.constant_(parameter, value)


def _gain(weight: Tensor | None, offset: float) -> Tensor | None:
    return weight + offset if weight is not None and offset else weight

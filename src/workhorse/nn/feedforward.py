"""Feed-forward sub-layers, applied to each position separately."""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from workhorse.config.base import Config
from workhorse.nn.facts import Divisions
from workhorse.nn.norms import PresentNormConfig
from workhorse.nn.shapes import Hidden

ActivationName = Literal["relu", "relu2", "gelu", "gelu_tanh", "silu", "sigmoid", "xielu"]


class MlpConfig(Config):
    """`down(act(up(x)))`. Paper: Attention Is All You Need, 1706.03762 §3.3."""

    kind: Literal["mlp"] = "mlp"
    d_ff: int = Field(gt=0)
    """Hidden width."""
    activation: ActivationName = "gelu"
    """Activation between the two projections."""
    bias: bool = False
    """Biases on both projections."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the hidden activations."""
    inner_norm: PresentNormConfig | None = None
    """A norm before the down projection (Magneto, 2210.06423 §2), or None."""

    def build(self, d_model: int) -> "Mlp":
        return Mlp(
            d_model,
            self.d_ff,
            activation=self.activation,
            bias=self.bias,
            dropout=self.dropout,
            inner_norm=self.inner_norm,
        )


class Mlp(nn.Module):
    """`down_proj(norm(act(up_proj(x))))`, `d_model -> d_ff -> d_model`; the norm is optional."""

    division: ClassVar[Divisions] = {
        "up_proj": "column",
        "inner_norm": "features",
        "down_proj": "row",
    }

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        activation: ActivationName = "gelu",
        bias: bool = False,
        dropout: float = 0.0,
        inner_norm: PresentNormConfig | None = None,
    ) -> None:
        super().__init__()
        self.up_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.activation = make_activation(activation)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.inner_norm = inner_norm.build(d_ff) if inner_norm else nn.Identity()
        self.down_proj = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x: Hidden) -> Hidden:
        hidden = self.activation(self.up_proj(x))
        return self.down_proj(self.inner_norm(self.dropout(hidden)))


class GatedConfig(Config):
    """Fields that all gated feed-forwards share: `down(combine(gate(x), up(x)))`."""

    d_ff: int = Field(gt=0)
    """Hidden width: the width of `gate(x)` and of `up(x)`."""
    bias: bool = False
    """Biases on the three projections."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the gated hidden activations."""

    @abstractmethod
    def combine(self) -> nn.Module:
        """Create the module that combines `gate(x)` and `up(x)`."""

    def build(self, d_model: int) -> nn.Module:
        return GatedMlp(
            d_model, self.d_ff, activation=self.combine(), bias=self.bias, dropout=self.dropout
        )


class GatedMlpConfig(GatedConfig):
    """`down(act(gate(x)) * up(x))`: SwiGLU with silu, GeGLU with gelu, GLU with sigmoid.

    Paper: GLU Variants Improve Transformer, 2002.05202.
    """

    kind: Literal["gated_mlp"] = "gated_mlp"
    activation: ActivationName = "silu"
    """Activation of `gate(x)`, which then multiplies `up(x)`."""
    inner_norm: PresentNormConfig | None = None
    """A norm before the down projection (Magneto, 2210.06423 §2; BitNet), or None."""

    def combine(self) -> nn.Module:
        return Gated(self.activation)

    def build(self, d_model: int) -> nn.Module:
        return GatedMlp(
            d_model,
            self.d_ff,
            activation=self.combine(),
            bias=self.bias,
            dropout=self.dropout,
            inner_norm=self.inner_norm,
        )


class ClampedSwigluConfig(Config):
    """`g * sigmoid(alpha g) * (u + 1)` with `g = gate(x)` and `u = up(x)`, both clamped."""

    limit: float = Field(default=7.0, gt=0)
    """Upper bound of `gate(x)`; `up(x)` is clamped to plus or minus this value."""
    alpha: float = 1.702
    """Factor on the input of the gate's sigmoid."""

    def combine(self) -> nn.Module:
        return ClampedSwiglu(self.limit, self.alpha)


class ClampedGatedMlpConfig(ClampedSwigluConfig, GatedConfig):
    """gpt-oss's clamped SwiGLU: `down(g * sigmoid(alpha g) * (u + 1))`, `g` and `u` clamped."""

    kind: Literal["clamped_gated_mlp"] = "clamped_gated_mlp"
    bias: bool = True
    """Biases on the three projections."""


class GatedMlp(nn.Module):
    """`down_proj(norm(activation(gate_proj(x), up_proj(x))))`, `d_model -> d_ff -> d_model`.

    Args:
        d_model: width of the input and output.
        d_ff: hidden width.
        activation: module that combines the gate and up projections; default: SwiGLU.
        bias: True to add biases to the three projections.
        dropout: dropout on the result of `activation`.
        inner_norm: norm on the input of the down projection, or None.
    """

    division: ClassVar[Divisions] = {"gate_proj": "column", **Mlp.division}

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        activation: nn.Module | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        inner_norm: PresentNormConfig | None = None,
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.up_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.activation = activation or Gated("silu")
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.inner_norm = inner_norm.build(d_ff) if inner_norm else nn.Identity()
        self.down_proj = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x: Hidden) -> Hidden:
        hidden = self.activation(self.gate_proj(x), self.up_proj(x))
        return self.down_proj(self.inner_norm(self.dropout(hidden)))


class Gated(nn.Module):
    """`act(gate) * up`."""

    def __init__(self, activation: ActivationName) -> None:
        super().__init__()
        self.activation = make_activation(activation)

    def forward(
        self, gate: Float[Tensor, "*shape"], up: Float[Tensor, "*shape"]
    ) -> Float[Tensor, "*shape"]:
        return self.activation(gate) * up


class ClampedSwiglu(nn.Module):
    """`g * sigmoid(alpha g) * (u + 1)` with `g <= limit` and `|u| <= limit` (gpt-oss)."""

    def __init__(self, limit: float = 7.0, alpha: float = 1.702) -> None:
        super().__init__()
        self.limit = limit
        self.alpha = alpha

    def forward(
        self, gate: Float[Tensor, "*shape"], up: Float[Tensor, "*shape"]
    ) -> Float[Tensor, "*shape"]:
        gate = gate.clamp(max=self.limit)
        up = up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)


class ReluSquared(nn.Module):
    """`relu(x)²`. Paper: Primer, 2109.08668."""

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return F.relu(x).square()


class XIELU(nn.Module):
    """xIELU: `a_p x² + b x` if x > 0, otherwise `(exp(min(x, eps)) - 1 - x) a_n + b x`.

    `a_p = softplus(p)` and `a_n = b + softplus(n)` are positive, with learned p and n.
    Paper: Deriving Activation Functions Using Integration, 2411.13010.
    """

    BETA = 0.5
    EPS = -1e-6
    INITIAL_ALPHA = 0.8

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.empty(1))
        self.alpha_n = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # log(expm1(x)) is the inverse of softplus.
        nn.init.constant_(self.alpha_p, math.log(math.expm1(self.INITIAL_ALPHA)))
        nn.init.constant_(self.alpha_n, math.log(math.expm1(self.INITIAL_ALPHA - self.BETA)))

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        above = F.softplus(self.alpha_p) * x.square()
        # Clamped, because an infinite expm1 for large x would make the gradient NaN.
        below = (self.BETA + F.softplus(self.alpha_n)) * (torch.expm1(x.clamp(max=self.EPS)) - x)
        return torch.where(x > 0, above, below) + self.BETA * x


_ACTIVATIONS: dict[ActivationName, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu2": ReluSquared,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
    "sigmoid": nn.Sigmoid,
    "xielu": XIELU,
}


def make_activation(name: ActivationName) -> nn.Module:
    """Create a new activation module; some activations have weights, so none are shared."""
    return _ACTIVATIONS[name]()

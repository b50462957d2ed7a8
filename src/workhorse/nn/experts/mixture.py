"""A mixture of experts: many gated feed-forwards, of which a router chooses a few for each token.

No token is dropped, however loaded an expert is. Papers: 1701.06538; with shared experts,
DeepSeekMoE, 2401.06066.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn

from workhorse.config.base import ConfigError
from workhorse.nn.elementwise import Multiplier, Product, Unchanged
from workhorse.nn.experts.grouped_linear import GroupedLinear, group_sorted
from workhorse.nn.experts.router import RouterConfig, Routing
from workhorse.nn.feedforward import (
    ActivationName,
    ClampedSwigluConfig,
    Gated,
    GatedConfig,
    GatedMlpConfig,
)
from workhorse.nn.norms import PresentNormConfig
from workhorse.nn.shapes import Hidden


class MoEConfig(GatedConfig):
    """`Σ weight_e · expert_e(x)` over the chosen experts, plus a shared expert if there is one.

    `d_ff`, `activation`, `bias` and `dropout` apply to every routed expert.
    """

    kind: Literal["moe"] = "moe"
    n_experts: int = Field(gt=0)
    """Number of routed experts."""
    top_k: int = Field(gt=0)
    """Routed experts that each token is sent to."""
    activation: ActivationName = "silu"
    """Activation of an expert's gate."""
    clamped: ClampedSwigluConfig | None = None
    """gpt-oss's clamped SwiGLU, in place of the activation."""
    router: RouterConfig = RouterConfig()
    """How the experts of a token are chosen and weighted."""
    weigh: Literal["output", "input"] = "output"
    """What the router's weight multiplies: an expert's output, or (Llama 4) its input."""
    shared: GatedMlpConfig | None = None
    """An expert applied to every token. Several are written as one of their total width."""
    shared_gate: bool = False
    """Multiply the shared expert's output by a sigmoid gate, one number per token (Qwen2-MoE)."""
    multiplier: float = Field(default=1.0, gt=0)
    """Factor on the sum of all experts; 0.5 averages the routed and the shared (Cohere)."""
    output_norm: PresentNormConfig | None = None
    """A norm on the sum of all experts (A.X-K1); left out: none."""

    def model_post_init(self, _context: object) -> None:
        self.router.check(self.n_experts, self.top_k)
        if self.shared_gate and self.shared is None:
            raise ConfigError("shared_gate=true needs a shared expert; add one, or leave it out")
        if self.clamped is not None and self.activation != "silu":
            raise ConfigError(
                f"activation={self.activation} and clamped exclude each other; leave one out"
            )

    def combine(self) -> nn.Module:
        return Gated(self.activation) if self.clamped is None else self.clamped.combine()

    def build(self, d_model: int) -> nn.Module:
        if self.shared is None:
            return MixtureOfExperts(d_model, self)
        kind = GatedSharedMixture if self.shared_gate else SharedMixture
        return kind(d_model, self, self.shared)


class MixtureOfExperts(nn.Module):
    """`Σ weight_e · expert_e(x)` over the experts that the router chooses."""

    def __init__(self, d_model: int, config: MoEConfig) -> None:
        super().__init__()
        self.router = config.router.build(d_model, config.n_experts, config.top_k)
        self.experts = Experts(
            d_model,
            config.d_ff,
            config.n_experts,
            activation=config.combine(),
            bias=config.bias,
            dropout=config.dropout,
            weigh=config.weigh,
        )
        self.multiply = Multiplier(config.multiplier) if config.multiplier != 1 else nn.Identity()
        norm = config.output_norm
        self.output_norm = norm.build(d_model) if norm else nn.Identity()

    def forward(self, x: Hidden) -> Hidden:
        return self.output_norm(self.multiply(self.mix(x)))

    def mix(self, x: Hidden) -> Hidden:
        """The sum of the experts' outputs."""
        tokens = x.flatten(0, 1)  # (batch · seq, d_model)
        return self.experts(tokens, self.router(tokens)).view_as(x)


class SharedMixture(MixtureOfExperts):
    """A mixture plus an expert that is applied to every token."""

    def __init__(self, d_model: int, config: MoEConfig, shared: GatedMlpConfig) -> None:
        super().__init__(d_model, config)
        self.shared = shared.build(d_model)

    def mix(self, x: Hidden) -> Hidden:
        return super().mix(x) + self.share(x)

    def share(self, x: Hidden) -> Hidden:
        """The shared expert's contribution."""
        return self.shared(x)


class GatedSharedMixture(SharedMixture):
    """A mixture plus `sigmoid(shared_gate(x)) · shared(x)`."""

    def __init__(self, d_model: int, config: MoEConfig, shared: GatedMlpConfig) -> None:
        super().__init__(d_model, config, shared)
        self.shared_gate = nn.Linear(d_model, 1, bias=False)

    def share(self, x: Hidden) -> Hidden:
        return torch.sigmoid(self.shared_gate(x)) * self.shared(x)


class Experts(nn.Module):
    """Gated feed-forwards with stacked weights, each applied to the tokens routed to it.

    The token-expert pairs are sorted by expert, so that each projection is one grouped product.
    Gathering and scattering sum nothing in an order that could vary: the result is deterministic.

    Args:
        d_model: width of a token's vector.
        d_ff: hidden width of an expert.
        n_experts: number of experts.
        activation: called with the gate and the other branch.
        bias: on the three projections of each expert.
        dropout: on the combined branches.
        weigh: what the router's weights multiply.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        n_experts: int,
        *,
        activation: nn.Module,
        bias: bool = False,
        dropout: float = 0.0,
        weigh: Literal["output", "input"] = "output",
    ) -> None:
        super().__init__()
        self.n_experts = n_experts
        self.gate_proj = GroupedLinear(n_experts, d_model, d_ff, bias=bias)
        self.up_proj = GroupedLinear(n_experts, d_model, d_ff, bias=bias)
        self.activation = activation
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.down_proj = GroupedLinear(n_experts, d_ff, d_model, bias=bias)
        self.weigh_input = Product() if weigh == "input" else Unchanged()
        self.weigh_output = Product() if weigh == "output" else Unchanged()

    def forward(
        self, x: Float[Tensor, "tokens d_model"], routing: Routing
    ) -> Float[Tensor, "tokens d_model"]:
        top_k = routing.experts.shape[1]
        experts, order = routing.experts.flatten().sort(stable=True)  # (tokens · top_k)
        weights = routing.weights.flatten()[order, None]
        rows = self.weigh_input(x[order // top_k], weights)  # (tokens · top_k, d_model)
        y = self.weigh_output(self.of_sorted(rows, experts), weights)
        y = torch.empty_like(y).index_copy_(0, order, y)  # each pair back beside its token
        return y.view(len(x), top_k, -1).sum(dim=1).to(x.dtype)

    def of_sorted(
        self, rows: Float[Tensor, "rows d_model"], experts: Int[Tensor, " rows"]
    ) -> Float[Tensor, "rows d_model"]:
        """What each row's expert makes of it; the numbers of the experts ascend."""
        groups = group_sorted(experts, self.n_experts)
        hidden = self.activation(self.gate_proj(rows, groups), self.up_proj(rows, groups))
        return self.down_proj(self.dropout(hidden), groups)

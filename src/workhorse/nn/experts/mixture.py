"""Mixture of experts: a router chooses a few of many gated feed-forwards for each token.

No token is dropped: experts have no capacity limit. Papers: 1701.06538; with shared experts,
DeepSeekMoE, 2401.06066.
"""

from fractions import Fraction
from typing import ClassVar, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn

from workhorse.config.base import ConfigError
from workhorse.nn.elementwise import Multiplier, Product, Unchanged
from workhorse.nn.experts.router import RouterConfig, Routing
from workhorse.nn.facts import Divisions, LinearFacts
from workhorse.nn.feedforward import (
    ActivationName,
    ClampedSwigluConfig,
    Gated,
    GatedConfig,
    GatedMlpConfig,
)
from workhorse.nn.norms import PresentNormConfig
from workhorse.nn.products import autocast_dtype
from workhorse.nn.shapes import Hidden

KERNEL_TYPES = (torch.float32, torch.bfloat16, torch.float16)
KERNEL_ALIGNMENT = 16
"""Alignment, in bytes, of every row that PyTorch's grouped matmul reads or writes."""


class Groups(NamedTuple):
    """The groups of sorted rows, such as tokens sorted by expert."""

    of_row: Int[Tensor, " rows"]
    """The group of each row, in ascending order."""
    ends: Int[Tensor, " groups"]
    """For each group, one more than the index of its last row, int32; for an empty group, the end
    of the group before."""


def group_sorted(of_row: Int[Tensor, " rows"], groups: int) -> Groups:
    """Create the `Groups` of rows that are already sorted by group.

    This does not synchronise with the device.

    Args:
        of_row: the group of each row, in ascending order.
        groups: number of groups.
    """
    every = torch.arange(groups, device=of_row.device)
    return Groups(of_row, torch.searchsorted(of_row, every, right=True, out_int32=True))


class GroupedLinear(nn.Module):
    """One linear map per group of rows: `x[r] @ weight[g]ᵀ + bias[g]` for the group g of row r.

    Args:
        groups: number of linear maps.
        in_features: width of an input row.
        out_features: width of an output row.
        bias: True if each map has a bias.

    Under autocast it computes in the autocast dtype, as `nn.Linear` does.
    """

    def __init__(
        self, groups: int, in_features: int, out_features: int, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(groups, out_features)) if bias else None

    @property
    def linear_facts(self) -> LinearFacts:
        return LinearFacts(self.weight.shape, self.weight.nbytes)

    def forward(
        self, x: Float[Tensor, "rows in_features"], groups: Groups
    ) -> Float[Tensor, "rows out_features"]:
        return self.product(x, groups, self.weight, self.bias)

    def product(self, x: Tensor, groups: Groups, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute `forward`, but with the given weight and bias."""
        dtype = autocast_dtype(x) or weight.dtype
        y = grouped_product(x.to(dtype), weight.to(dtype), groups.ends)
        return y if bias is None else y + bias[groups.of_row].to(dtype)


def grouped_product(
    x: Float[Tensor, "rows in_features"],
    weight: Float[Tensor, "groups out_features in_features"],
    ends: Int[Tensor, " groups"],
) -> Float[Tensor, "rows out_features"]:
    """`x[r] @ weight[g]ᵀ` for the group g of each row r; g has the rows `ends[g-1]` to `ends[g]`.

    It uses PyTorch's grouped kernel if the kernel supports these shapes, otherwise one matmul per
    group. In bfloat16 on Hopper and Blackwell, the kernel does not synchronise with the device. On
    one CPU thread in float32, it takes 0.4 times as long as separate matmuls for 0.5 rows per
    group, and 1.1 times for 1,024 rows per group. The kernel's backward pass fails if the gradient
    is an expanded tensor (stride 0), such as the gradient of `y.sum()`.
    """
    if _kernel_takes(weight):
        return F.grouped_mm(x, weight.mT, offs=ends)
    sizes = cast(list[int], ends.diff(prepend=ends.new_zeros(1)).tolist())  # pyright: ignore[reportUnknownMemberType]
    pieces = zip(torch.split_with_sizes(x, sizes), weight.unbind(), strict=True)
    return torch.cat([F.linear(rows, matrix) for rows, matrix in pieces])


def _kernel_takes(weight: Tensor) -> bool:
    """True if PyTorch's grouped kernel supports the weight's dtype and the alignment of its rows.

    Inside `torch.compile`, it supports only bfloat16.
    """
    aligned = all(width * weight.itemsize % KERNEL_ALIGNMENT == 0 for width in weight.shape[1:])
    types = (torch.bfloat16,) if torch.compiler.is_compiling() else KERNEL_TYPES
    return aligned and weight.dtype in types


class MoEConfig(GatedConfig):
    """`Σ weight_e · expert_e(x)` over the chosen experts, plus a shared expert if there is one.

    `d_ff`, `activation`, `bias` and `dropout` apply to every routed expert.
    """

    kind: Literal["moe"] = "moe"
    n_experts: int = Field(gt=0)
    """Number of routed experts."""
    top_k: int = Field(gt=0)
    """Number of routed experts per token."""
    activation: ActivationName = "silu"
    """Activation of an expert's gate."""
    clamped: ClampedSwigluConfig | None = None
    """gpt-oss's clamped SwiGLU, used instead of `activation`, or None."""
    router: RouterConfig = RouterConfig()
    """How the experts of a token are chosen and weighted."""
    weigh: Literal["output", "input"] = "output"
    """The tensor that the router's weight multiplies: an expert's output or input (Llama 4)."""
    shared: GatedMlpConfig | None = None
    """An expert applied to every token, or None. Several shared experts are one expert with their
    total width."""
    shared_gate: bool = False
    """Multiply the shared expert's output by a sigmoid gate, one value per token (Qwen2-MoE)."""
    multiplier: float = Field(default=1.0, gt=0)
    """Factor on the sum of all experts; 0.5 averages routed and shared experts (Cohere)."""
    output_norm: PresentNormConfig | None = None
    """A norm on the sum of all experts (A.X-K1), or None."""

    def model_post_init(self, _context: object) -> None:
        self.router.check(self.n_experts, self.top_k)
        if self.shared_gate and self.shared is None:
            raise ConfigError("shared_gate=true needs a shared expert; set shared")
        if self.clamped is not None and self.activation != "silu":
            raise ConfigError(
                f"activation={self.activation} and clamped exclude each other; remove one"
            )

    @property
    def used_share(self) -> Fraction:
        """The fraction of the experts that each token uses."""
        return Fraction(self.top_k, self.n_experts)

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
        self.used_share = config.used_share
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
        """The weighted sum of the experts' outputs, before `multiplier` and `output_norm`."""
        tokens = x.flatten(0, 1)  # (batch · seq, d_model)
        return self.experts(tokens, self.router(tokens)).view_as(x)


class SharedMixture(MixtureOfExperts):
    """A mixture of experts, plus a shared expert that is applied to every token."""

    def __init__(self, d_model: int, config: MoEConfig, shared: GatedMlpConfig) -> None:
        super().__init__(d_model, config)
        self.shared = shared.build(d_model)

    def mix(self, x: Hidden) -> Hidden:
        return super().mix(x) + self.share(x)

    def share(self, x: Hidden) -> Hidden:
        """The shared expert's output, which is added to the output of the routed experts."""
        return self.shared(x)


class GatedSharedMixture(SharedMixture):
    """A mixture of experts, plus a gated shared expert: `sigmoid(shared_gate(x)) · shared(x)`."""

    def __init__(self, d_model: int, config: MoEConfig, shared: GatedMlpConfig) -> None:
        super().__init__(d_model, config, shared)
        self.shared_gate = nn.Linear(d_model, 1, bias=False)

    def share(self, x: Hidden) -> Hidden:
        return torch.sigmoid(self.shared_gate(x)) * self.shared(x)


class Experts(nn.Module):
    """Gated feed-forwards with stacked weights, each applied to the tokens routed to it.

    The token-expert pairs are sorted by expert, so that each projection is one grouped matmul. The
    outputs of a token's experts are added in a fixed order, so the result is deterministic.

    Args:
        d_model: width of a token's vector.
        d_ff: hidden width of an expert.
        n_experts: number of experts.
        activation: module that combines the gate and up projections, such as `Gated`.
        bias: True to add biases to the three projections of each expert.
        dropout: dropout on the result of `activation`.
        weigh: the tensor that the router's weights multiply.
    """

    division: ClassVar[Divisions] = {
        "gate_proj": "column",
        "up_proj": "column",
        "down_proj": "row",
    }

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
        y = torch.empty_like(y).index_copy_(0, order, y)  # back to token order
        return y.view(len(x), top_k, -1).sum(dim=1).to(x.dtype)

    def of_sorted(
        self, rows: Float[Tensor, "rows d_model"], experts: Int[Tensor, " rows"]
    ) -> Float[Tensor, "rows d_model"]:
        """The output of each row's expert; the rows must be sorted by expert."""
        groups = group_sorted(experts, self.n_experts)
        hidden = self.activation(self.gate_proj(rows, groups), self.up_proj(rows, groups))
        return self.down_proj(self.dropout(hidden), groups)

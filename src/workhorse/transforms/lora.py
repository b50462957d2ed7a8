"""Low-rank adapters: trained updates of linear layers whose own weights stay frozen.

    y = W x + b + scale · B A dropout(x)

A has `rank` rows and B has `rank` columns, so an adapter has few parameters. B starts at zero, so
an adapted model starts as its base (LoRA, 2106.09685 §4.1). W may be quantised (QLoRA, 2305.14314).
The layers of a mixture's experts get an A and a B for each expert.

`add_adapter` (`workhorse.transforms.adapters`) replaces a layer by one of a subclass, which keeps
the names of the layer's weights. The parameters of the adapter `default` of a layer `q_proj` are
`q_proj.adapters.default.lora_a.weight`, `….lora_b.weight` and, in DoRA, `….magnitude`.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal, TypeVar, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from workhorse.config.base import Config, ConfigError
from workhorse.nn.experts.mixture import GroupedLinear, Groups
from workhorse.nn.experts.router import Float32Linear
from workhorse.nn.products import wide, without_autocast
from workhorse.nn.surgery import as_subclass
from workhorse.transforms.quantization import (
    QuantizedGroupedLinear,
    QuantizedLinear,
    QuantizedWeight,
    row_blocks,
)

Name = Annotated[str, Field(min_length=1)]
Value = TypeVar("Value")
MAX_ALPHA = 1e6
"""An alpha far above this gives updates that overflow float32."""
MAGNITUDE = ".magnitude"
"""End of the names of DoRA's magnitudes, which stay in float32."""


class LoraConfig(Config):
    """A low-rank adapter: LoRA (2106.09685), rsLoRA (2312.03732) or DoRA (2402.09353)."""

    kind: Literal["lora"] = "lora"
    rank: int = Field(default=8, gt=0)
    """Rank of the update of each weight."""
    alpha: float = Field(default=16.0, gt=0, le=MAX_ALPHA)
    """Factor on the update; it is divided by the divisor that `scaling` names."""
    scaling: Literal["rank", "sqrt_rank"] = "rank"
    """Divisor of alpha: the rank, or its square root (rsLoRA: the size of the update then does not
    depend on the rank)."""
    ranks: dict[Name, Annotated[int, Field(gt=0)]] = Field(default={})
    """Layers with another rank, by the last parts of their names, such as `{down_proj: 16}`."""
    alphas: dict[Name, Annotated[float, Field(gt=0, le=MAX_ALPHA)]] = Field(default={})
    """Layers with another alpha, by the last parts of their names."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the input of the update. The input of the frozen weight has none."""
    dora: bool = False
    """True to train the length of each row of a weight separately from its direction (DoRA)."""
    targets: Literal["all"] | tuple[Name, ...] = "all"
    """Linear layers that get an update: `all` inside the blocks, except routers; or a list with the
    last parts of their names, such as `q_proj`, `router.proj` or `layers.0.attention.q_proj`."""
    also_train: tuple[Name, ...] = ()
    """Modules whose own weights are trained too: the last parts of their names, such as
    `embedding`, `head` or `final_norm`."""

    def model_post_init(self, _context: object) -> None:
        if not self.targets:
            raise ConfigError("the list is empty; name linear layers, or set it to all", "targets")

    @property
    def scale(self) -> float:
        """Factor on `B A`."""
        return self.alpha / self.divisor(self.rank)

    def divisor(self, rank: int) -> float:
        """The divisor of alpha for a rank."""
        return rank if self.scaling == "rank" else math.sqrt(rank)

    def of(self, path: str) -> "LoraConfig":
        """The options for one layer, with the rank and the alpha of this layer."""
        rank = _value_for(path, self.ranks, self.rank)
        alpha = _value_for(path, self.alphas, self.alpha)
        return self.replace(rank=rank, alpha=alpha, ranks={}, alphas={})

    def build(self, weight: torch.Size, *, in_float32: bool = False) -> "LowRank":
        """Build the adapter of a layer with a weight of this shape, with uninitialised values.

        `in_float32` is True for an update that is always computed in float32, like a router.
        """
        made = (Dora if self.dora else LowRank)(self, weight)
        if in_float32:
            made.lora_a = as_subclass(made.lora_a, Float32Linear)
            made.lora_b = as_subclass(made.lora_b, Float32Linear)
        return made


class LowRank(nn.Module):
    """The update `scale · B A dropout(x)` of one layer.

    Args:
        config: options of the adapter.
        weight: shape of the layer's weight, (out_features, in_features) or (experts, out_features,
            in_features).
    """

    def __init__(self, config: LoraConfig, weight: torch.Size) -> None:
        super().__init__()
        *experts, out_features, in_features = weight
        self.scale = config.scale
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.lora_a = _linear(experts, in_features, config.rank)
        self.lora_b = _linear(experts, config.rank, out_features)

    def forward(self, x: Tensor, y: Tensor, layer: "Adapted", *groups: Groups) -> Tensor:
        """Add the update to the output of the frozen layer.

        Args:
            x: the layer's input, (…, in_features).
            y: the layer's output without adapter, (…, out_features).
            layer: the layer.
            groups: the expert of each row, if the layer is a stack of experts.
        """
        del layer  # `Dora` needs it
        return torch.add(y, self.update(x, *groups), alpha=self.scale)

    def update(self, x: Tensor, *groups: Groups) -> Tensor:
        """`B A dropout(x)`."""
        return self.lora_b(self.lora_a(self.dropout(x), *groups), *groups)

    def merged(self, expert: int, rows: slice, weight: Tensor) -> Tensor:
        """`W + scale · B A` for some rows of W, in float32 or wider.

        Args:
            expert: index of the matrix in a stack of experts; otherwise 0.
            rows: the rows of the matrix.
            weight: these rows of W, (rows, in_features).
        """
        dtype = wide(weight.dtype)
        a, b = (matrices(part.weight)[expert].to(dtype) for part in (self.lora_a, self.lora_b))
        return torch.addmm(weight.to(dtype), b[rows], a, alpha=self.scale)

    @torch.no_grad()
    def reset(self, layer: "Adapted", generator: torch.Generator) -> None:
        """Set the initial values: A uniform as in `nn.Linear`, and B zero.

        Args:
            layer: the layer.
            generator: a generator on the CPU, so that values do not depend on the device.
        """
        del layer  # `Dora` needs it
        a = self.lora_a.weight
        bound = 1 / math.sqrt(a.shape[-1])
        drawn = torch.empty(a.shape, dtype=torch.float32, device="cpu")
        a.copy_(drawn.uniform_(-bound, bound, generator=generator))
        self.lora_b.weight.zero_()


class Dora(LowRank):
    """DoRA: each row of `W + scale · B A` is scaled to a trained length, its magnitude.

        y = magnitude / ‖W + scale · B A‖ · (W x + scale · B A dropout(x)) + b

    The norm of a row is a constant in the gradient (2402.09353 §4.3). With dropout, PEFT also
    applies it to the x of `(magnitude / ‖…‖ - 1) · W x`; here that x has none.
    """

    def __init__(self, config: LoraConfig, weight: torch.Size) -> None:
        super().__init__(config, weight)
        dtype = wide(self.lora_b.weight.dtype)  # the factor is 1 exactly, then close to 1
        self.magnitude = nn.Parameter(torch.empty(weight[:-1], dtype=dtype))

    def forward(self, x: Tensor, y: Tensor, layer: "Adapted", *groups: Groups) -> Tensor:
        factor, bias = self.magnitude / self.norms(layer), layer.bias
        for of_rows in groups:
            factor = factor[of_rows.of_row]
            bias = None if bias is None else bias[of_rows.of_row]
        without_bias = y if bias is None else y - bias
        # Added to y, so that y keeps its bits if the factor is 1.
        y = torch.addcmul(y, (factor - 1).to(y.dtype), without_bias)
        return torch.addcmul(y, (factor * self.scale).to(y.dtype), self.update(x, *groups))

    @torch.no_grad()
    def norms(self, layer: "Adapted") -> Tensor:
        """The norms of the rows of `W + scale · B A`, in the shape of the magnitudes."""
        norms = torch.empty_like(self.magnitude)
        rows_of = norms.view(-1, norms.shape[-1])
        with without_autocast(norms):
            for expert, rows, weight in rows_in_blocks(layer):
                merged = super().merged(expert, rows, weight)
                rows_of[expert, rows] = torch.linalg.vector_norm(merged, dim=1)
        return norms

    def merged(self, expert: int, rows: slice, weight: Tensor) -> Tensor:
        merged = super().merged(expert, rows, weight)
        magnitude = self.magnitude.view(-1, self.magnitude.shape[-1])[expert, rows, None]
        return merged * (magnitude / torch.linalg.vector_norm(merged, dim=1, keepdim=True))

    @torch.no_grad()
    def reset(self, layer: "Adapted", generator: torch.Generator) -> None:
        super().reset(layer, generator)
        self.magnitude.copy_(self.norms(layer))


class Adapted(nn.Module):
    """A mixin for linear layers with adapters, one of which may be active.

    Attributes:
        adapters: the adapters of this layer, by name.
        active: name of the adapter to apply; None for the frozen layer only.
        in_float32: True if the layer and its updates always compute in float32, as a router does.
    """

    in_float32: ClassVar[bool] = False
    adapters: nn.ModuleDict
    active: str | None
    bias: nn.Parameter | None

    def forward(self, x: Tensor, *groups: Groups) -> Tensor:
        y = super().forward(x, *groups)
        return y if self.active is None else self.adapters[self.active](x, y, self, *groups)

    def matrix(self) -> Tensor:
        """The weight with the update of the active adapter, in the dtype of the weight."""
        return self.dense_weight if self.active is None else merged_weight(self)

    @property
    def dense_weight(self) -> Tensor:
        """The frozen weight; the layer must not be quantised."""
        return cast(Tensor, self.weight)

    @property
    def weight_shape(self) -> torch.Size:
        """Shape of the frozen weight, quantised or not."""
        return self.shape if isinstance(self, QuantizedWeight) else self.dense_weight.shape


class LoraLinear(Adapted, nn.Linear):
    """`nn.Linear` with adapters."""


class LoraFloat32Linear(Adapted, Float32Linear):
    """`Float32Linear`, the layer of a router, with adapters."""

    in_float32 = True


class LoraGroupedLinear(Adapted, GroupedLinear):
    """`GroupedLinear` with adapters: each expert has its own A and B."""


class LoraQuantizedLinear(Adapted, QuantizedLinear):
    """`QuantizedLinear` with adapters (QLoRA, 2305.14314)."""


class LoraQuantizedGroupedLinear(Adapted, QuantizedGroupedLinear):
    """`QuantizedGroupedLinear` with adapters."""


ADAPTED: dict[type[nn.Module], type[Adapted]] = {
    nn.Linear: LoraLinear,
    Float32Linear: LoraFloat32Linear,
    GroupedLinear: LoraGroupedLinear,
    QuantizedLinear: LoraQuantizedLinear,
    QuantizedGroupedLinear: LoraQuantizedGroupedLinear,
}
"""For each class of layers that can have adapters, the class with adapters."""


def merged_weight(layer: Adapted) -> Tensor:
    """The weight of a layer with the update of its active adapter, in the weight's dtype."""
    assert layer.active is not None
    adapter = layer.adapters[layer.active]
    assert isinstance(adapter, LowRank)
    total = torch.empty_like(layer.dense_weight, requires_grad=False)
    for expert, rows, weight in rows_in_blocks(layer):
        matrices(total)[expert, rows] = adapter.merged(expert, rows, weight).to(total.dtype)
    return total


def rows_in_blocks(layer: Adapted) -> Iterator[tuple[int, slice, Tensor]]:
    """Yield the frozen weight of a layer in blocks of rows: expert (or 0), rows, and their values.

    Blocks have about a million elements; those of a quantised weight are float32.
    """
    if isinstance(layer, QuantizedWeight):
        yield from layer.in_blocks()
        return
    for expert, matrix in enumerate(matrices(layer.dense_weight)):
        for rows in row_blocks(len(matrix), matrix.shape[1]):
            yield expert, rows, matrix[rows]


def matrices(weight: Tensor) -> Tensor:
    """A weight as a stack of matrices, (experts, out_features, in_features); 1 for a matrix."""
    return weight.view(-1, *weight.shape[-2:])


def ends_with(path: str, name: str) -> bool:
    """True if `name` is the name of a module, or its last parts."""
    return f".{path}".endswith(f".{name}")


def _value_for(path: str, values: Mapping[str, Value], default: Value) -> Value:
    """The value of the first name that the path of a layer ends with."""
    return next((value for name, value in values.items() if ends_with(path, name)), default)


def _linear(experts: list[int], in_features: int, out_features: int) -> nn.Linear | GroupedLinear:
    if experts:
        return GroupedLinear(experts[0], in_features, out_features)
    return nn.Linear(in_features, out_features, bias=False)

"""Weight initialisation."""

import math
from abc import abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal, Protocol, cast, runtime_checkable

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from workhorse.config.base import Config
from workhorse.nn.experts.mixture import GroupedLinear

RESIDUAL_PROJECTIONS = ("out_proj", "down_proj")
"""Names of the projections into the residual stream."""
HEAD = "head.proj"
Weights = Mapping[str, nn.Parameter]


@runtime_checkable
class HasOwnStart(Protocol):
    """A module that sets its own initial weights: norms, sinks, learned activations."""

    def reset_parameters(self) -> None: ...


class SchemeConfig(Config):
    """Fields of every initialisation scheme.

    Embeddings are drawn from a normal distribution. Biases start at 0, norms at 1.
    """

    embedding_std: float = Field(default=0.02, ge=0)
    """Standard deviation of token vectors and learned positions."""
    residual: Literal["plain", "scaled", "zero"] = "scaled"
    """Projections into the residual stream: `plain` treats them like other matrices; `scaled`
    multiplies them by `1/sqrt(2 n_layers)`, so that the stream's variance does not grow with depth
    (GPT-2); `zero` makes every layer start as the identity."""
    head: Literal["plain", "zero"] = "plain"
    """The head: `plain` follows the scheme; `zero` starts at 0 and needs an untied head."""

    @property
    def fixed_std(self) -> float | None:
        """Standard deviation of every matrix if it is equal at any width, otherwise None."""
        return None

    @abstractmethod
    def draw(self, weight: Tensor, generator: torch.Generator | None) -> None:
        """Fill a matrix of shape `(out, in)` with random values, in place."""

    def draw_linear(
        self, name: str, weight: Tensor, n_layers: int, generator: torch.Generator | None
    ) -> None:
        """Initialise the matrix of the linear module `name`, as `residual` and `head` require."""
        residual = name.rpartition(".")[2] in RESIDUAL_PROJECTIONS
        if (residual and self.residual == "zero") or (name == HEAD and self.head == "zero"):
            nn.init.zeros_(weight)
            return
        self.draw(weight, generator)
        if residual and self.residual == "scaled":
            weight.mul_(1 / math.sqrt(2 * n_layers))


class NormalInitConfig(SchemeConfig):
    """Every matrix from one normal distribution (GPT-2)."""

    kind: Literal["normal"] = "normal"
    std: float = Field(default=0.02, gt=0)
    """Standard deviation of every matrix."""

    @property
    def fixed_std(self) -> float:
        return self.std

    def draw(self, weight: Tensor, generator: torch.Generator | None) -> None:
        nn.init.normal_(weight, std=self.std, generator=generator)


class FanInInitConfig(SchemeConfig):
    """Normal with variance `gain² / fan_in` (PaLM: `n^-0.5`; 2204.02311 §5)."""

    kind: Literal["fan_in"] = "fan_in"
    gain: float = Field(default=1.0, gt=0)
    """Factor on the standard deviation `1/sqrt(fan_in)`."""

    def draw(self, weight: Tensor, generator: torch.Generator | None) -> None:
        nn.init.normal_(weight, std=self.gain / math.sqrt(weight.shape[1]), generator=generator)


class XavierInitConfig(SchemeConfig):
    """Uniform with variance `2 / (fan_in + fan_out)` (Glorot and Bengio, 2010)."""

    kind: Literal["xavier"] = "xavier"

    def draw(self, weight: Tensor, generator: torch.Generator | None) -> None:
        nn.init.xavier_uniform_(weight, generator=generator)


class HeInitConfig(SchemeConfig):
    """Normal with variance `2 / fan_in` (1502.01852)."""

    kind: Literal["he"] = "he"

    def draw(self, weight: Tensor, generator: torch.Generator | None) -> None:
        nn.init.kaiming_normal_(weight, nonlinearity="relu", generator=generator)


InitConfig = Annotated[
    NormalInitConfig | FanInInitConfig | XavierInitConfig | HeInitConfig,
    Field(discriminator="kind"),
]


@contextmanager
def undrawn(dtype: torch.dtype, discard_on: torch.device | None = None) -> Generator[None]:
    """Context manager in which new modules have uninitialised weights.

    Args:
        dtype: dtype of the weights.
        discard_on: for modules on the meta device: a device on which their initial values are drawn
            and discarded, one tensor at a time, so that its random generator advances as if the
            modules were created there. None: nothing is drawn.
    """
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _SkipDraws(discard_on):
            yield
    finally:
        torch.set_default_dtype(usual)


ON_META = (nn.init.kaiming_uniform_, nn.init.normal_, nn.init.uniform_)
"""Initialisers to skip for meta tensors, which have no values. Their only effect would be a slow
import of PyTorch's compiler."""


class _SkipDraws(TorchFunctionMode):
    def __init__(self, discard_on: torch.device | None) -> None:
        super().__init__()
        self.discard_on = discard_on

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        given = cast(dict[str, Any], kwargs or {})
        if func in (Tensor.uniform_, Tensor.normal_):
            return args[0]
        if func in ON_META:
            tensor: Tensor = args[0] if args else given["tensor"]
            if tensor.is_meta:
                if self.discard_on is not None:
                    given.pop("tensor", None)
                    func(torch.empty(tensor.shape, device=self.discard_on), *args[1:], **given)
                return tensor
        return func(*args, **given)


@torch.no_grad()
def initialize(
    decoder: nn.Module,
    scheme: SchemeConfig,
    n_layers: int,
    generator: torch.Generator | None = None,
) -> None:
    """Initialise every weight of a decoder, in the order of its modules.

    Args:
        decoder: decoder to initialise in place.
        scheme: initialisation scheme.
        n_layers: depth, which sets the scale of residual projections.
        generator: random generator on the weights' device; default: the global generator.
    """
    for name, module, own in _owners(decoder):
        _start(name, module, own, scheme=scheme, n_layers=n_layers, generator=generator)


@torch.no_grad()
def initial_weights(
    decoder: nn.Module, scheme: SchemeConfig, n_layers: int, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights that `initialize` would give a decoder, without holding all of them.

    The weights are allocated one module at a time. Their values come from the device's global
    random generator.

    Args:
        decoder: decoder on the meta device; it stays there.
        scheme: initialisation scheme.
        n_layers: depth, which sets the scale of residual projections.
        device: device to create the weights on.

    Yields:
        the name and the values of each weight.
    """
    for name, module, own in _owners(decoder):
        for key, empty in own.items():
            room = torch.empty(empty.shape, dtype=empty.dtype, device=device)
            setattr(module, key, nn.Parameter(room, requires_grad=empty.requires_grad))
        _start(name, module, own, scheme=scheme, n_layers=n_layers)
        for key, empty in own.items():
            yield f"{name}.{key}", getattr(module, key).detach()
            setattr(module, key, empty)


def _owners(decoder: nn.Module) -> Iterator[tuple[str, nn.Module, Weights]]:
    """Yield each module that owns weights: its name, the module, and these weights.

    A tied matrix is owned by the embedding.
    """
    seen: set[Tensor] = set()  # the embedding comes first, so it owns a tied matrix
    modules = cast(Iterable[tuple[str, nn.Module]], decoder.named_modules())
    for name, module in modules:
        weights = module.named_parameters(recurse=False)
        own = {key: weight for key, weight in weights if weight not in seen}
        seen.update(own.values())
        if own:
            yield name, module, own


def _start(
    name: str,
    module: nn.Module,
    own: Weights,
    *,
    scheme: SchemeConfig,
    n_layers: int,
    generator: torch.Generator | None = None,
) -> None:
    """Initialise the weights that one module owns."""
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=scheme.embedding_std, generator=generator)
    elif isinstance(module, nn.Linear | GroupedLinear):
        matrices = module.weight if isinstance(module, GroupedLinear) else module.weight[None]
        for matrix in matrices if "weight" in own else ():
            scheme.draw_linear(name, matrix, n_layers, generator)
        if "bias" in own:
            nn.init.zeros_(cast(Tensor, module.bias))
    elif isinstance(module, HasOwnStart):
        module.reset_parameters()

"""Facts about modules, which code outside `nn` asks for instead of testing their classes.

A class declares a fact beside its computation, as an attribute or a method. A new class that
declares its facts is then counted, quantised and divided like the classes of `nn`. The facts of
norms are in `norms.py`, and those of attention layers are attributes of `SelfAttention`.
"""

from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import ClassVar, Literal, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import nn

Division = Literal["column", "row", "features", "heads", "vocabulary"]
"""How tensor parallelism divides the parameters of a submodule among ranks (1909.08053 §3).

- `column`: a linear layer by its outputs, with its bias.
- `row`: a linear layer by its inputs. The outputs are summed over the ranks; its bias is not
  divided.
- `features`: a norm over divided features. Its statistics are sums over the ranks.
- `heads`: a list of modules, or a vector, with one element per head.
- `vocabulary`: a matrix, and its bias, by token ids.

If there are fewer key and value heads than ranks, each rank has all parameters of one head.
"""
Divisions = Mapping[str, Division]
"""The division of submodules and own parameters, by name; those without an entry are replicated."""


@runtime_checkable
class Divided(Protocol):
    """A module whose class declares how it is divided."""

    division: ClassVar[Divisions]


def division_of(module: nn.Module) -> Divisions:
    """How the submodules and own parameters of a module are divided; empty if none is."""
    return module.division if isinstance(module, Divided) else {}


class LinearFacts(NamedTuple):
    """The weight of a linear layer, or of a stack of them."""

    shape: torch.Size
    """(out_features, in_features), or (experts, out_features, in_features)."""
    nbytes: int
    """Size in bytes, of codes and scales if it is quantised."""


@runtime_checkable
class Linear(Protocol):
    """A linear layer that is not an `nn.Linear`, such as a quantised one or a stack of experts."""

    def linear_facts(self) -> LinearFacts:
        """Shape and size of the weight."""
        ...


@runtime_checkable
class Mixture(Protocol):
    """A mixture of experts: each token uses only a part of the weights of `experts`."""

    experts: nn.Module

    @property
    def used_share(self) -> Fraction:
        """The fraction of the experts that each token uses."""
        ...


@runtime_checkable
class Multiplies(Protocol):
    """A module that multiplies by the weights of linear submodules itself."""

    multiplied_here: ClassVar[tuple[str, ...]]


def multiplied_by_owner(root: nn.Module) -> set[nn.Module]:
    """The linear layers whose weights their owners multiply by, so that none may be replaced."""
    owners = (part for part in root.modules() if isinstance(part, Multiplies))
    return {owner.get_submodule(name) for owner in owners for name in owner.multiplied_here}


def linear_layers(root: nn.Module) -> Iterator[tuple[str, LinearFacts, Fraction]]:
    """Yield all linear layers of a model.

    Yields:
        path: name of the layer.
        facts: shape and size of its weight.
        share: the fraction of the weight that multiplies a token, below 1 for routed experts.
    """
    shares: dict[object, Fraction] = {}
    named = cast(Iterable[tuple[str, nn.Module]], root.named_modules())
    for path, module in named:  # a mixture comes before its experts
        if isinstance(module, Mixture):
            shares.update(dict.fromkeys(module.experts.modules(), module.used_share))
        share = shares.get(module, Fraction(1))
        if isinstance(module, nn.Linear):
            yield path, LinearFacts(module.weight.shape, module.weight.nbytes), share
        elif isinstance(module, Linear):
            yield path, module.linear_facts(), share

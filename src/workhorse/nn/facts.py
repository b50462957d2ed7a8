"""Facts about modules, which code outside `nn` asks for instead of testing their classes.

A class declares a fact beside its computation, as an attribute or a method. A new class that
declares its facts is then counted, quantised and divided like the classes of `nn`. The facts of
norms are in `norms.py`, and those of attention layers are attributes of `SelfAttention`.
"""

from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Literal, NamedTuple, cast

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


def division_of(module: nn.Module) -> Divisions:
    """The `division` that the module's class declares; empty if none."""
    return getattr(module, "division", {})


class LinearFacts(NamedTuple):
    """The weight of a linear layer, or of a stack of them."""

    shape: torch.Size
    """(out_features, in_features), or (experts, out_features, in_features)."""
    nbytes: int
    """Size in bytes, of codes and scales if it is quantised."""


def linear_facts(module: nn.Module) -> LinearFacts | None:
    """The facts of a linear layer, also if it is quantised or a stack; None for other modules.

    Classes that are not `nn.Linear` declare a property `linear_facts`.
    """
    if isinstance(module, nn.Linear):
        return LinearFacts(module.weight.shape, module.weight.nbytes)
    return getattr(module, "linear_facts", None)


def linear_layers(root: nn.Module) -> Iterator[tuple[str, LinearFacts, Fraction]]:
    """Yield all linear layers of a model: name, facts, and the share of it that a token uses.

    The share is below 1 for routed experts: the `used_share` that a mixture of experts declares.
    """
    shares: dict[nn.Module, Fraction] = {}
    for path, module in cast(Iterable[tuple[str, nn.Module]], root.named_modules()):
        share: Fraction | None = getattr(module, "used_share", None)
        if share is not None:  # a mixture comes before its experts
            shares.update(dict.fromkeys(module.get_submodule("experts").modules(), share))
        if facts := linear_facts(module):
            yield path, facts, shares.get(module, Fraction(1))


def multiplied_by_owner(root: nn.Module) -> set[nn.Module]:
    """The linear layers that their owners declare as `multiplied_here`; none may be replaced."""
    return {
        owner.get_submodule(name)
        for owner in root.modules()
        for name in getattr(owner, "multiplied_here", ())
    }

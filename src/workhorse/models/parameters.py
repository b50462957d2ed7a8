"""Parameter counts of a decoder, by component, without allocating it."""

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

from torch import nn

from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.blocks import BlockConfig
from workhorse.nn.norms import norm_facts

COMPONENTS = ("embedding", "attention", "feed_forward", "norms", "head")
EXPERTS = ["feed_forward", "experts"]
"""The path of a layer's routed experts."""


def count_parameters(config: DecoderConfig) -> dict[str, int]:
    """The parameters of each of `COMPONENTS`, and their `total`.

    `embedding` counts token vectors and learned positions, `norms` every norm, wherever it is, and
    `head` what the head does not share with the embedding: a tied matrix is counted once.
    """
    counts: dict[str, int] = dict.fromkeys(COMPONENTS, 0)
    for path, owner, _, number in _parameters(config):
        counts[_component(path, owner)] += number
    return {**counts, "total": sum(counts.values())}


def active_parameters(config: DecoderConfig) -> int:
    """Parameters active on one token: of a mixture's experts, as many as the router chooses.

    The whole embedding counts, although a token looks up only one row.
    """
    total = Fraction(0)
    for path, _, block, number in _parameters(config):
        mixture = block.mixture if block and _is_of_experts(path) else None
        share = Fraction(mixture.top_k, mixture.n_experts) if mixture else 1
        total += number * share
    return int(total)


def components_of(decoder: Decoder) -> dict[str, str]:
    """The component of every parameter and buffer, by name: one of `COMPONENTS`, or `experts`."""
    return {
        name: "experts" if _is_of_experts(path := name.split(".")) else _component(path, owner)
        for name in decoder.state_dict(keep_vars=True)
        for owner in [decoder.get_submodule(name.rpartition(".")[0])]
    }


def _parameters(
    config: DecoderConfig,
) -> Iterator[tuple[list[str], nn.Module, BlockConfig | None, int]]:
    """Each parameter of a decoder with one layer of each kind.

    Yields:
        path: its name in parts.
        owner: the module that holds it.
        block: the config of its layer, None outside the layers.
        number: its size times the number of layers of its kind.
    """
    layers = Counter(config.layer_names())
    kinds = tuple(layers)  # layers of one name are equally large: one of each is built
    decoder = config.replace(n_layers=len(kinds), pattern=kinds).build(device="meta")
    for name, parameter in decoder.named_parameters():  # names a tied matrix once, as embedding
        path = name.split(".")
        owner = decoder.get_submodule(".".join(path[:-1]))
        kind = kinds[int(path[1])] if path[0] == "layers" else None
        block = config.blocks[kind] if kind else None
        yield path, owner, block, parameter.numel() * (layers[kind] if kind else 1)


def _is_of_experts(path: list[str]) -> bool:
    return path[2:4] == EXPERTS


def _component(path: list[str], owner: nn.Module) -> str:
    """The component that the parameter at a path belongs to."""
    if norm_facts(owner) is not None:
        return "norms"
    return path[2].removesuffix("_convolution") if path[0] == "layers" else path[0]

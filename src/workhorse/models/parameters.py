"""How many numbers a decoder learns, by component, without allocating any."""

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

from torch import nn

from workhorse.nn import DecoderConfig
from workhorse.nn.blocks import BlockConfig
from workhorse.nn.experts.mixture import MoEConfig
from workhorse.nn.norms import LayerNorm, RMSNorm

COMPONENTS = ("embedding", "attention", "feed_forward", "norms", "head")
EXPERTS = ["feed_forward", "experts"]
"""Where a layer keeps its routed experts."""


def count_parameters(config: DecoderConfig) -> dict[str, int]:
    """Learned numbers of each of `COMPONENTS`, and their `total`.

    `embedding` holds token vectors and learned positions, `norms` every norm wherever it sits, and
    `head` what the head does not share with the embedding: a tied matrix is counted once.
    """
    counts: dict[str, int] = dict.fromkeys(COMPONENTS, 0)
    for path, owner, _, number in _parameters(config):
        counts[_component(path, owner)] += number
    return {**counts, "total": sum(counts.values())}


def active_parameters(config: DecoderConfig) -> int:
    """Learned numbers at work on one token: of a mixture's experts, as many as the router chooses.

    The embedding counts whole, though a token looks up one row of it.
    """
    total = Fraction(0)
    for path, _, block, number in _parameters(config):
        mixture = block.feed_forward if block and path[2:4] == EXPERTS else None
        share = Fraction(mixture.top_k, mixture.n_experts) if isinstance(mixture, MoEConfig) else 1
        total += number * share
    return int(total)


def _parameters(
    config: DecoderConfig,
) -> Iterator[tuple[list[str], nn.Module, BlockConfig | None, int]]:
    """Each parameter of a decoder with one layer of each kind.

    Gives:
        path: its name in parts.
        owner: the module that holds it.
        block: the config of its layer, None outside the layers.
        number: how many numbers it and those in its place in other layers of its kind hold.
    """
    layers = Counter(config.layer_names())
    kinds = tuple(layers)  # layers of one name hold as much as each other: one of each is built
    decoder = config.replace(n_layers=len(kinds), pattern=kinds).build(device="meta")
    for name, parameter in decoder.named_parameters():  # names a tied matrix once, as embedding
        path = name.split(".")
        owner = decoder.get_submodule(".".join(path[:-1]))
        kind = kinds[int(path[1])] if path[0] == "layers" else None
        block = config.blocks[kind] if kind else None
        yield path, owner, block, parameter.numel() * (layers[kind] if kind else 1)


def _component(path: list[str], owner: nn.Module) -> str:
    """What the parameter at that path of a decoder belongs to."""
    if isinstance(owner, LayerNorm | RMSNorm):
        return "norms"
    return path[2] if path[0] == "layers" else path[0]

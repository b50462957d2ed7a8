"""How many numbers a decoder learns, by component, without allocating any."""

from collections import Counter

from torch import nn

from workhorse.nn import DecoderConfig
from workhorse.nn.norms import LayerNorm, RMSNorm

COMPONENTS = ("embedding", "attention", "feed_forward", "norms", "head")


def count_parameters(config: DecoderConfig) -> dict[str, int]:
    """Learned numbers of each of `COMPONENTS`, and their `total`.

    `embedding` holds token vectors and learned positions, `norms` every norm wherever it sits, and
    `head` what the head does not share with the embedding: a tied matrix is counted once.
    """
    layers = Counter(config.layer_names())
    kinds = tuple(layers)  # layers of one name hold as much as each other: one of each is built
    decoder = config.replace(n_layers=len(kinds), pattern=kinds).build(device="meta")
    counts: dict[str, int] = dict.fromkeys(COMPONENTS, 0)
    for name, parameter in decoder.named_parameters():  # names a tied matrix once, as embedding
        path = name.split(".")
        owner = decoder.get_submodule(".".join(path[:-1]))
        times = layers[kinds[int(path[1])]] if path[0] == "layers" else 1
        counts[_component(path, owner)] += parameter.numel() * times
    return {**counts, "total": sum(counts.values())}


def _component(path: list[str], owner: nn.Module) -> str:
    """What the parameter at that path of a decoder belongs to."""
    if isinstance(owner, LayerNorm | RMSNorm):
        return "norms"
    return path[2] if path[0] == "layers" else path[0]

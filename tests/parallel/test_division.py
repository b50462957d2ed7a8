"""The divisions that classes declare (`workhorse.nn.facts`) are those of the tensors of a part."""

import pytest
from torch import nn

from tests.nn.grid import COVERING
from workhorse.config.base import ConfigError
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.facts import division_of
from workhorse.parallel.config import share_of
from workhorse.parallel.division.parts import check_layers
from workhorse.parallel.division.teams import part_of_model

WAYS = 2


def divisible(config: DecoderConfig) -> bool:
    try:
        check_layers(config, WAYS)
    except ConfigError:
        return False
    return True


def declared(decoder: Decoder) -> dict[str, str]:
    """The declared division of each parameter, by name; replicated ones are omitted."""
    ways: dict[str, str] = {}
    for path, module in decoder.named_modules():
        for name, way in division_of(module).items():
            part = getattr(module, name)
            inside = part.named_parameters() if isinstance(part, nn.Module) else [("", part)]
            ways |= {f"{path}.{name}.{key}".strip("."): way for key, _ in inside}
    return ways


def of_rank(name: str, shape: tuple[int, ...], way: str, vocabulary: int) -> tuple[int, ...]:
    """The shape of a rank's part of a parameter."""
    bias = name.endswith(".bias")
    if way == "row" and bias:
        return shape
    axis = {"column": -1 if bias else -2, "row": -1}.get(way, 0) % len(shape)
    size = len(share_of(vocabulary, WAYS, 0)) if way == "vocabulary" else shape[axis] // WAYS
    return (*shape[:axis], size, *shape[axis + 1 :])


@pytest.mark.parametrize("config", [one for one in COVERING if divisible(one)])
def test_declared_divisions_are_those_of_the_parts(config: DecoderConfig) -> None:
    whole = config.build(device="meta")
    part = part_of_model(config, WAYS).build(device="meta")
    sizes = {name: tuple(weight.shape) for name, weight in part.named_parameters()}
    ways = declared(whole)
    for name, weight in whole.named_parameters():
        shape, way = tuple(weight.shape), ways.get(name)
        layer = int(name.split(".")[1]) if name.startswith("layers.") else 0
        attention = config.blocks[config.layer_names()[layer]].grouped
        copied = attention is not None and attention.n_kv_heads == 1
        if way is None or (
            copied and ".attention." in name and name.split(".")[3].startswith(("k_", "v_"))
        ):
            assert sizes[name] == shape, name
        elif way == "heads" and ".heads." in name:
            heads = len(whole.get_submodule(name.rpartition(".heads.")[0] + ".heads"))
            head = int(name.rpartition(".heads.")[2].partition(".")[0])
            assert (name in sizes) == (head < heads // WAYS), name
        else:
            assert sizes[name] == of_rank(name, shape, way, config.vocab_size), name

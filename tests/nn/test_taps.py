"""Every tensor of interest is the output of a separate module, called once per forward pass."""

from collections import Counter

import pytest
import torch
from torch import nn

from tests.nn.grid import COVERING, make, name, random_tokens
from workhorse.nn import DecoderConfig


@pytest.mark.parametrize("config", COVERING, ids=map(name, range(len(COVERING))))
def test_every_module_is_called_once(config: DecoderConfig) -> None:
    decoder = make(config)
    called: Counter[str] = Counter()
    modules = dict(decoder.named_modules(remove_duplicate=False))
    for path, module in modules.items():
        module.register_forward_hook(lambda *_, path=path: called.update([path]))
    with torch.no_grad():
        decoder(random_tokens(config, 2, 6))
    lists = {path for path, module in modules.items() if isinstance(module, nn.ModuleList)}
    assert called == dict.fromkeys(modules.keys() - lists, 1)


def test_rotated_queries_and_keys_can_be_told_apart() -> None:
    config = next(
        config
        for config in COVERING
        for block in config.blocks.values()
        if block.attention.kind == "attention" and block.attention.position.kind == "rope"
    )
    decoder = make(config)
    shapes: dict[str, torch.Size] = {}

    def note(path: str):
        def hook(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
            shapes[path] = output.shape

        return hook

    for path, module in decoder.named_modules():
        if path.endswith(("q_rotation", "k_rotation")):
            module.register_forward_hook(note(path))
    with torch.no_grad():
        decoder(random_tokens(config, 2, 6))
    assert {path.rpartition(".")[2] for path in shapes} == {"q_rotation", "k_rotation"}

"""Small models of transformers with random weights, and their weights under our names."""

import math
import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from tests.nn.grid import error, random_tokens
from workhorse.nn import Decoder, DecoderConfig

Weights = Mapping[str, Tensor]
Rule = tuple[str, str | Callable[..., Tensor]]
"""A pattern of our names, and theirs (with `\\1` for the layer) or what computes the tensor."""


def randomise(model: nn.Module) -> nn.Module:
    """Weights large enough for every part to matter, always the same."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
    return model.eval()


def renamed(theirs: Weights, ours: Decoder, rules: list[Rule]) -> dict[str, Tensor]:
    """Their weights under our names: the first rule whose pattern our name begins with decides."""
    result = {}
    for name in ours.state_dict():
        for pattern, source in rules:
            match = re.match(pattern, name)
            if match is None:
                continue
            if callable(source):
                result[name] = source(theirs, *match.groups())
            else:
                result[name] = theirs[match.expand(source) + name[match.end() :]]
            break
    return result


def assert_same_logits(
    model: nn.Module, data: dict, rules: list[Rule], *, seq: int = 12, kernel: str = "auto"
) -> None:
    """The same logits from the same weights, to 1e-5."""
    decoder = DecoderConfig.from_dict(data).build(kernel).eval()
    weights = renamed(randomise(model).state_dict(), decoder, rules)
    decoder.load_state_dict(weights)  # strict: each of our parameters found one of theirs
    tokens = random_tokens(decoder.config, 2, seq)
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        logits = decoder(tokens)
    assert expected.std() > 0.05
    assert error(logits, expected) <= 1e-5


def tail(pattern: str) -> str:
    """Our name of a module of a layer, with the layer's number as group 1."""
    return rf"layers\.(\d+)\.{pattern}"


LLAMA_RULES: list[Rule] = [
    (r"embedding\.tokens", "model.embed_tokens"),
    (r"final_norm", "model.norm"),
    (r"head\.proj", "lm_head"),
    (tail(r"attention\.out_proj"), r"model.layers.\1.self_attn.o_proj"),
    (tail(r"attention\.([qkv]_proj)"), r"model.layers.\1.self_attn.\2"),
    (tail(r"feed_forward\."), r"model.layers.\1.mlp."),
    (tail(r"attention_norm"), r"model.layers.\1.input_layernorm"),
    (tail(r"feed_forward_norm"), r"model.layers.\1.post_attention_layernorm"),
]

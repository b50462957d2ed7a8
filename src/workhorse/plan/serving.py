"""What a device can serve: weights, the cache of a text, and how many texts at once."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from workhorse.devices.tape import stand_in, without_data
from workhorse.errors import WorkhorseError
from workhorse.memory.capacity import cache_bytes, cache_of_layers
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.experts.mixture import GroupedLinear, MixtureOfExperts
from workhorse.plan.devices import GIGA
from workhorse.transforms.quantization import FormatName, QuantizedWeight, place_codes

WAYS: dict[str, FormatName | None] = {"bfloat16": None, "int8": "int8", "int4": "int4"}
"""Ways to hold the weights, each with the format of its codes."""


def serving(
    config: DecoderConfig,
    device: torch.device,
    *,
    context: int,
    room: int | None,
    bandwidth: float | None,
) -> dict[str, Any]:
    """Bytes of weights and cache, and the texts that fit, for each way of holding the weights.

    Args:
        config: of the decoder.
        device: the kind.
        context: tokens of each text.
        room: bytes of the device; None: not known.
        bandwidth: of its memory, 10^9 bytes a second; None: not known.

    Returns:
        `bytes_per_token` (of the cache, at the beginning of a text), `context`, `bytes_per_text`,
        and for each of `WAYS` `weights` (bytes, as they are allocated), `texts` at once, and
        `tokens_per_second`, the most that one text can have: every weight that multiplies a token,
        and half the text's cache on average, are read once for each. A way is None if no layer
        is wide enough for its codes.
    """
    layers = cache_of_layers(config, torch.bfloat16)
    per_text = cache_bytes(layers, context)
    ways: dict[str, dict[str, Any] | None] = dict.fromkeys(WAYS)
    for name, format in WAYS.items():
        try:
            weights, multiplied = bytes_of_weights(config, device, format)
        except WorkhorseError:
            continue
        way: dict[str, Any] = {"weights": weights, "texts": None, "tokens_per_second": None}
        ways[name] = way
        if room is not None:
            way["texts"] = max(0, (room - weights) // per_text)
        if bandwidth is not None:
            read = multiplied + per_text / 2
            way["tokens_per_second"] = bandwidth * GIGA / read
    return {
        "bytes_per_token": cache_bytes(layers, 1),
        "context": context,
        "bytes_per_text": per_text,
        **ways,
    }


def bytes_of_weights(
    config: DecoderConfig, device: torch.device, format: FormatName | None
) -> tuple[int, int]:
    """Bytes that a decoder loaded for inference has in weights, and those that multiply a token.

    Layers of one name are equally large: each name is built once, and once more for what a further
    layer adds.

    Args:
        config: of the decoder.
        device: the kind; it decides what is quantised, see `place_codes`.
        format: of the codes; None: all of it is bfloat16.

    Raises:
        WorkhorseError: no layer is wide enough for codes.
    """
    here = stand_in(device)

    def of(names: Sequence[str]) -> tuple[int, int]:
        few = config.replace(n_layers=len(names), pattern=tuple(names))
        with without_data(here):
            decoder = few.build(device=here, dtype=torch.bfloat16).eval()
            if format is not None:
                place_codes(decoder, format)
        return allocated(decoder), multiplied_bytes(decoder)

    counts = Counter(config.layer_names())
    once = weights, multiplied = of(tuple(counts))
    for name, count in counts.items():
        if count > 1:
            more = of((*counts, name))
            weights += (count - 1) * (more[0] - once[0])
            multiplied += (count - 1) * (more[1] - once[1])
    return weights, multiplied


def allocated(decoder: Decoder) -> int:
    """Bytes of all parameters and buffers, each storage once."""
    tensors = (*decoder.parameters(), *decoder.buffers())
    storages = {id(one := tensor.untyped_storage()): one for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def multiplied_bytes(decoder: Decoder) -> int:
    """Bytes of the weights that multiply one token: of experts those that the router chooses."""
    read = 0
    experts: set[nn.Module] = set()
    for module in decoder.modules():
        if isinstance(module, MixtureOfExperts):
            stacks = [part for part in module.experts.modules() if _weight_bytes(part)]
            experts.update(stacks)
            share = module.router.top_k / module.router.n_experts
            read += int(share * sum(_weight_bytes(part) for part in stacks))
        elif module not in experts:
            read += _weight_bytes(module)
    return read


def _weight_bytes(module: nn.Module) -> int:
    """Of a matrix, or a stack of them, as it is held; 0 for other modules."""
    if isinstance(module, QuantizedWeight):
        return module.nbytes
    return module.weight.nbytes if isinstance(module, nn.Linear | GroupedLinear) else 0

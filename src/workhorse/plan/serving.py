"""Serving on a device: bytes of weights and KV cache, and the number of concurrent sequences."""

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
"""Ways to store the weights, each with its quantisation format; None: not quantised."""


def serving(
    config: DecoderConfig,
    device: torch.device,
    *,
    context: int,
    room: int | None,
    bandwidth: float | None,
) -> dict[str, Any]:
    """Bytes of weights and cache, and the sequences that fit, for each way to store the weights.

    `tokens_per_second` is the limit of one sequence by memory bandwidth: each token reads every
    weight that multiplies it, and on average half of the sequence's cache.

    Args:
        config: the decoder's config.
        device: the type of device.
        context: number of tokens per sequence.
        room: memory of the device in bytes; None: unknown.
        bandwidth: memory bandwidth in 10^9 bytes per second; None: unknown.

    Returns:
        `bytes_per_token` (cache bytes of the first token), `context` and `bytes_per_text` (cache
        bytes of a sequence). For each of `WAYS`: `weights` (bytes allocated), `texts` (number of
        concurrent sequences) and `tokens_per_second`. A way is None if no layer is wide enough to
        quantise.
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
    """Bytes of all weights of a decoder loaded for inference, and of those that multiply a token.

    Layers with the same name have the same size. So a decoder with one layer per name is built, and
    one with a second layer of a name gives the size that each further layer adds.

    Args:
        config: the decoder's config.
        device: the type of device; it decides which weights are quantised, see `place_codes`.
        format: the quantisation format; None: all weights are bfloat16.

    Raises:
        WorkhorseError: no layer is wide enough to quantise.
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
    """Bytes of all parameters and buffers; shared storages count once."""
    tensors = (*decoder.parameters(), *decoder.buffers())
    storages = {id(one := tensor.untyped_storage()): one for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def multiplied_bytes(decoder: Decoder) -> int:
    """Bytes of the weights that multiply one token; of experts, only the chosen ones."""
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
    """Bytes of a stored matrix or stack of matrices; 0 for other modules."""
    if isinstance(module, QuantizedWeight):
        return module.nbytes
    return module.weight.nbytes if isinstance(module, nn.Linear | GroupedLinear) else 0

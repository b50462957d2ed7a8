"""What a device can serve: weights, the cache of a text, and how many texts at once."""

from typing import Any

import torch

from workhorse.models.parameters import active_parameters, count_parameters
from workhorse.nn import DecoderConfig
from workhorse.plan.devices import GIGA
from workhorse.plan.kv_cache import cache_bytes, cache_of_layers

WEIGHT_BITS = {"bfloat16": 16.0, "int8": 8.5, "int4": 4.5}
"""A number, with the scale of its group of 32."""


def serving(
    config: DecoderConfig, context: int, room: int | None, bandwidth: float | None
) -> dict[str, Any]:
    """Bytes of weights and cache, and the texts that fit, for each way of holding the weights.

    Args:
        config: of the decoder.
        context: tokens of each text.
        room: bytes of the device; None: not known.
        bandwidth: of its memory, 10^9 bytes a second; None: not known.

    Returns:
        `bytes_per_token` (of the cache, at the beginning of a text), `context`, `bytes_per_text`,
        and for each of `WEIGHT_BITS` `weights` (bytes), `texts` at once, and `tokens_per_second`,
        the most that one text can have: every weight that works on a token, and half the text's
        cache on average, are read once for each.
    """
    layers = cache_of_layers(config, torch.bfloat16)
    per_text = cache_bytes(layers, context)
    total, active = count_parameters(config)["total"], active_parameters(config)
    ways: dict[str, dict[str, Any]] = {}
    for name, bits in WEIGHT_BITS.items():
        weights = int(total * bits / 8)
        ways[name] = {"weights": weights, "texts": None, "tokens_per_second": None}
        if room is not None:
            ways[name]["texts"] = max(0, (room - weights) // per_text)
        if bandwidth is not None:
            read = active * bits / 8 + per_text / 2
            ways[name]["tokens_per_second"] = bandwidth * GIGA / read
    return {
        "bytes_per_token": cache_bytes(layers, 1),
        "context": context,
        "bytes_per_text": per_text,
        **ways,
    }

"""Memory of a served model: the size of its cache, and an estimate without loading it."""

from pathlib import Path
from typing import NamedTuple

import torch

from workhorse.checkpoints.sizes import elements_of_adapter
from workhorse.checkpoints.stored import is_stored, no_such_model, open_stored
from workhorse.devices.memory import available, size
from workhorse.devices.names import resolve_device, resolve_dtype
from workhorse.errors import WorkhorseError
from workhorse.memory.model_memory import cache_bytes, cache_of_layers
from workhorse.models import preset, preset_names
from workhorse.models.describe import count_parameters
from workhorse.nn import DecoderConfig
from workhorse.nn.cache.paged import BLOCK
from workhorse.plan.limits import bytes_of_weights
from workhorse.serve.settings import EngineSettings

SHARE = 0.5
"""Fraction of the free memory that the cache may use by default."""


class Fit(NamedTuple):
    """The sizes of a served model, and the memory that is left."""

    context: int
    """Maximum number of tokens of a completion with its prompt."""
    weights: int
    """Bytes of the weights, adapters included."""
    bytes_per_token: int
    """Bytes of one token in the cache, as the mean over a full context."""
    cache_tokens: int
    """Number of tokens in the cache."""
    free: int | None
    """Free bytes of the device, without the weights; None if unknown."""

    @property
    def sentence(self) -> str:
        """The figures, for a user."""
        free = "unknown" if self.free is None else size(self.free)
        return (
            f"weights {size(self.weights)}, cache {self.cache_tokens:,} tokens in "
            f"{size(self.cache_tokens * self.bytes_per_token)}, free {free} beside the weights: "
            f"{self.cache_tokens // self.context} completions of a full context of "
            f"{self.context:,} tokens at a time, or "
            f"{self.cache_tokens // max(1, self.context // 4)} of a quarter"
        )


def fit(settings: EngineSettings) -> Fit:
    """Compute what fits, from the files of the model without its weights.

    Raises:
        WorkhorseError: there is no such model; or it, or its cache, does not fit.
    """
    device, dtype = resolve_device(settings.device), resolve_dtype(settings.dtype)
    if is_stored(settings.model):
        stored = open_stored(settings.model, weights=False)
        config, dtype = stored.config, dtype or stored.dtype
    elif settings.model in preset_names():
        config, dtype = preset(settings.model), dtype or torch.float32
    else:
        raise no_such_model(settings.model)
    weights = count_parameters(config)["total"] * dtype.itemsize
    if settings.quantize != "none":
        weights, _ = bytes_of_weights(config, device, settings.quantize)  # pyright: ignore
    paths = [*settings.adapters.values(), *([settings.adapter] if settings.adapter else [])]
    weights += sum(elements_of_adapter(Path(path)) for path in paths) * dtype.itemsize
    free = available(device)
    if free is not None and weights > free:
        raise WorkhorseError(
            f"the weights need {size(weights)} and {size(free)} are free on {device.type}; choose "
            "a narrower dtype, --quantize, or a smaller model"
        )
    left = None if free is None else free - weights
    tokens, per_token = cache_tokens(config, dtype, settings, left)
    return Fit(config.max_seq_len, weights, per_token, tokens, left)


def cache_tokens(
    config: DecoderConfig, dtype: torch.dtype, settings: EngineSettings, free: int | None
) -> tuple[int, int]:
    """Return the number of tokens in the cache, over all completions, and the bytes of each.

    Args:
        config: the decoder's config.
        dtype: the dtype of the cache.
        settings: the settings of the engine.
        free: the free bytes of the device; None if unknown.

    Raises:
        WorkhorseError: the cache does not fit into memory, or holds less than a block.
    """
    context = config.max_seq_len
    per_token = -(-cache_bytes(cache_of_layers(config, dtype), context) // context)
    asked, most = settings.cache_tokens, settings.max_sequences * context
    if asked is None:
        room = most if free is None else int(SHARE * free / per_token)
        if room < context:
            raise WorkhorseError(
                f"half of the free memory holds {room:,} tokens, less than a context of "
                f"{context:,}; set --cache-tokens {max(room, BLOCK)} for shorter completions"
            )
        return min(most, room), per_token
    if asked < BLOCK:
        raise WorkhorseError(f"--cache-tokens={asked} is less than a block; give {BLOCK} or more")
    if free is not None and asked * per_token > free:
        raise WorkhorseError(
            f"a cache of {asked:,} tokens needs {size(asked * per_token)} and {size(free)} are "
            "free; reduce --cache-tokens"
        )
    return min(asked, most), per_token

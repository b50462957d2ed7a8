"""The memory of a model for inference: its weights, and the caches of its layers."""

from itertools import islice
from typing import NamedTuple, cast

import torch

from workhorse.checkpoints.runs.run_directory import RunDirectory
from workhorse.checkpoints.sizes import WeightSize, bytes_on_disk, weights_on_disk
from workhorse.checkpoints.stored import StoredModel
from workhorse.devices.memory import available, check_fits
from workhorse.devices.names import dtype_name
from workhorse.devices.tape import without_data
from workhorse.models.describe import count_parameters
from workhorse.nn import DecoderConfig
from workhorse.nn.blocks import Block
from workhorse.nn.cache.paged import BLOCK, Store
from workhorse.nn.cache.paged_view import PagedView


class LayerCache(NamedTuple):
    """The cache of one layer's attention, or of one short convolution's inputs."""

    bytes_per_token: int
    reach: int | None
    """Maximum number of tokens in the cache, the attention window; None: no limit."""


def cache_of_layers(config: DecoderConfig, dtype: torch.dtype) -> list[LayerCache]:
    """The caches of all layers in order, as the paged cache allocates them.

    There is one entry for the attention of each layer, and one for each short convolution.

    Args:
        config: the decoder's config.
        dtype: the dtype for decoding.

    Raises:
        WorkhorseError: attention is not causal, so it has no cache.
    """
    names = config.layer_names()
    kinds = tuple(dict.fromkeys(names))  # layers with the same name are identical
    with without_data(), torch.no_grad():
        decoder = config.replace(n_layers=len(kinds), pattern=kinds).build(dtype=dtype).eval()
        cache = decoder.new_paged_cache(tokens=config.max_seq_len, sequences=1)
        view = PagedView(cache, [cache.new_sequence()])
        decoder.hidden(torch.zeros(1, 1, dtype=torch.int64), cache=view)
        stores = iter(cache.stores)
        found: dict[str, list[LayerCache]] = {}
        for name, layer in zip(kinds, decoder.layers, strict=True):
            count = len(cast(Block, layer).cache_stores(cache))
            found[name] = [_kept(store) for store in islice(stores, count)]
    return [room for name in names for room in found[name]]


def _kept(store: Store) -> LayerCache:
    assert store.k is not None
    assert store.v is not None
    slots = store.pool.count * BLOCK
    return LayerCache((store.k.nbytes + store.v.nbytes) // slots, store.pool.reach)


def cache_bytes(layers: list[LayerCache], tokens: int) -> int:
    """Cache bytes of a sequence of `tokens` tokens, not rounded up to whole blocks."""
    return sum(layer.bytes_per_token * min(tokens, layer.reach or tokens) for layer in layers)


MAX_EXPANSION = 8
"""Float32 weights take at most this many times their bytes on disk: the ratio for 4-bit weights."""
REMEDY = "choose a narrower dtype (bfloat16), quantize (int8, int4), or a smaller model"


def check_random(
    name: str, config: DecoderConfig, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise an error if the weights of a random-weight model do not fit into memory.

    Raises:
        WorkhorseError: the weights do not fit.
    """
    total = count_parameters(config)["total"] * dtype.itemsize
    what = f"{name} with its weights in {dtype_name(dtype)}"
    check_fits(total, device, what, "choose a narrower dtype (bfloat16), or a smaller model")


def check_stored(
    stored: StoredModel,
    device: torch.device,
    dtype: torch.dtype | None,
    *,
    codes_per_byte: int | None,
) -> None:
    """Raise an error if the weights of a stored model do not fit into memory.

    Weights that stay memory-mapped from their files need no memory.

    Args:
        stored: the model.
        device: the device for its weights.
        dtype: the dtype of the loaded weights; None: as stored.
        codes_per_byte: number of weights per byte if loading quantises them; None if it does not.

    Raises:
        WorkhorseError: the weights do not fit.
    """
    size = bytes_on_disk(stored)
    free = available(device)
    if free is None or MAX_EXPANSION * size <= free:  # skip the slow count for small models
        return
    dtype = dtype or stored.dtype
    total = count_parameters(stored.config)["total"]
    if codes_per_byte:
        check_fits(total // codes_per_byte, device, f"{stored.path}, quantised,", REMEDY)
        return
    if device.type == "cpu" and not isinstance(stored, RunDirectory):
        total -= weights_on_disk(stored).get(dtype_name(dtype), WeightSize(0, 0)).numbers
    what = f"{stored.path} with its weights in {dtype_name(dtype)}"
    check_fits(max(total, 0) * dtype.itemsize, device, what, REMEDY)

"""What a text takes of the KV cache."""

from itertools import islice
from typing import NamedTuple

import torch

from workhorse.devices.tape import without_data
from workhorse.nn import DecoderConfig
from workhorse.nn.cache.blocks import BLOCK
from workhorse.nn.cache.paged import Store
from workhorse.nn.cache.paged_view import PagedView
from workhorse.nn.convolution import ShortConvolution


class LayerCache(NamedTuple):
    """The cache of one layer's attention, or of the inputs of one of its convolutions."""

    bytes_per_token: int
    reach: int | None
    """The most tokens that it keeps: the window's; None: all."""


def cache_of_layers(config: DecoderConfig, dtype: torch.dtype) -> list[LayerCache]:
    """What each layer keeps, as the paged cache allocates it: one entry for each store, in order.

    Args:
        config: of the decoder.
        dtype: that it decodes in.

    Raises:
        WorkhorseError: attention that is not causal has no cache.
    """
    names = config.layer_names()
    kinds = tuple(dict.fromkeys(names))  # layers of one name are alike
    with without_data(), torch.no_grad():
        decoder = config.replace(n_layers=len(kinds), pattern=kinds).build(dtype=dtype).eval()
        cache = decoder.new_paged_cache(tokens=config.max_seq_len, sequences=1)
        view = PagedView(cache, [cache.new_sequence()])
        decoder.hidden(torch.zeros(1, 1, dtype=torch.int64), cache=view)
        stores = iter(cache.stores)
        found: dict[str, list[LayerCache]] = {}
        for name, layer in zip(kinds, decoder.layers, strict=True):
            short = sum(isinstance(part, ShortConvolution) for part in layer.modules())
            found[name] = [_kept(store) for store in islice(stores, 1 + short)]
    return [room for name in names for room in found[name]]


def _kept(store: Store) -> LayerCache:
    assert store.k is not None
    assert store.v is not None
    slots = store.pool.count * BLOCK
    return LayerCache((store.k.nbytes + store.v.nbytes) // slots, store.pool.reach)


def cache_bytes(layers: list[LayerCache], tokens: int) -> int:
    """Bytes that a text of so many tokens keeps, not rounded up to whole blocks."""
    return sum(layer.bytes_per_token * min(tokens, layer.reach or tokens) for layer in layers)

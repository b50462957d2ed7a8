"""The computed size of a KV cache equals the allocated size."""

import pytest
import torch

from tests.nn.grid import CAUSAL, make, random_tokens
from workhorse.memory.model_memory import LayerCache, cache_bytes, cache_of_layers
from workhorse.models import preset
from workhorse.nn.cache.paged import BLOCK
from workhorse.nn.cache.paged_view import PagedView

SOME = CAUSAL[:8]


@pytest.mark.parametrize("number", range(len(SOME)))
def test_a_layers_bytes_are_those_allocated(number: int) -> None:
    config = SOME[number]
    decoder = make(config)
    cache = decoder.new_paged_cache(tokens=64, sequences=2)
    view = PagedView(cache, [cache.new_sequence()])
    with torch.no_grad():
        decoder(random_tokens(config, 1, 4), cache=view)
    for store, layer in zip(cache.stores, cache_of_layers(config, torch.float32), strict=True):
        assert store.k is not None
        assert store.v is not None
        slots = store.pool.count * BLOCK
        assert layer.bytes_per_token * slots == store.k.nbytes + store.v.nbytes
        assert layer.reach == store.pool.reach


def test_published_models() -> None:
    llama = cache_of_layers(preset("llama-2-7b").replace(n_layers=2), torch.bfloat16)
    assert llama == [LayerCache(2 * 32 * 128 * 2, None)] * 2  # keys and values of 32 heads
    latent = cache_of_layers(preset("deepseek-v3").replace(n_layers=61), torch.bfloat16)
    assert {layer.bytes_per_token for layer in latent} == {(512 + 64) * 2}  # 2412.19437 §2.1.1


def test_a_window_bounds_what_is_kept() -> None:
    layers = [LayerCache(10, None), LayerCache(10, 4)]
    assert [cache_bytes(layers, tokens) for tokens in (0, 3, 4, 100)] == [0, 60, 80, 1040]

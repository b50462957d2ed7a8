"""A batch of sequences in a paged cache, with an interface like `Decoder.new_cache`."""

from workhorse.nn import Decoder
from workhorse.nn.cache.paged_view import PagedView


def paged(decoder: Decoder, batch: int, capacity: int, slack: int = 0) -> PagedView:
    """`batch` empty sequences of up to `capacity` tokens."""
    cache = decoder.new_paged_cache(batch * capacity, batch, slack)
    return PagedView(cache, [cache.new_sequence() for _ in range(batch)])

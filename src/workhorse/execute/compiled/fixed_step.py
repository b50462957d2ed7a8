"""Steps of fixed shape: passes that do the same whatever the cache holds, but for its tensors.

They add a token to each row of a `PagedView`, or a token and guesses, as many as the cache can take
back. So they can be compiled, or recorded, once for all lengths.
"""

from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from workhorse.errors import WorkhorseError
from workhorse.nn import Decoder
from workhorse.nn.cache.fixed import CacheTensors, FixedCache, Layout, layout_of, tensors_of
from workhorse.nn.cache.paged_view import PagedView
from workhorse.nn.cache.view import CacheView


class Variant(NamedTuple):
    """What a program is specialised on: all steps with these properties run the same one."""

    layout: Layout
    batched: bool
    """Whether there are several rows, of any number."""
    guessed: bool
    """Whether there are several tokens per row, of any number."""


def check_fixed(decoder: Decoder, what: str) -> None:
    """Refuse a decoder whose steps differ in shape or constants.

    Args:
        decoder: whose steps are to be fixed.
        what: what they are fixed for, as in "compiled".

    Raises:
        WorkhorseError: see `why_not_fixed`.
    """
    if reason := why_not_fixed(decoder):
        raise WorkhorseError(f"{reason}, so steps cannot be {what}; choose execution=auto")


def why_not_fixed(decoder: Decoder) -> str:
    """Why steps of a decoder differ in shape or constants; empty: they do not.

    It has a mixture of experts, or angles that depend on the text's length.
    """
    blocks = decoder.config.blocks.values()
    if any(block.mixture for block in blocks):
        return "a mixture of experts has other shapes at every token"
    if any(block.rope and block.rope.depends_on_length for block in blocks):
        return "rope scaling dynamic_ntk and longrope depend on the text's length"
    return ""


def fixed_step(decoder: Decoder, variant: Variant, tokens: Tensor, tensors: CacheTensors) -> Tensor:
    """The logits of a step over a `FixedCache`, by the decoder's modules.

    Args:
        decoder: in evaluation mode.
        variant: of the step.
        tokens: (batch, seq), the new ones.
        tensors: of the cache; `lengths` grows by seq.
    """
    return Decoder.forward(decoder, tokens, cache=FixedCache(variant.layout, tensors))


class FixedStepDecoder(Decoder):
    """A decoder that takes such steps by other means; prompts and everything else run as before."""

    def fixed_step(self, variant: Variant, tokens: Tensor, tensors: CacheTensors) -> Tensor:
        """See the function `fixed_step`."""
        return fixed_step(self, variant, tokens, tensors)

    def next_logits(
        self, tokens: Tensor, *, positions: Tensor | None = None, cache: CacheView | None = None
    ) -> Tensor:
        if tokens.shape[1] == 1 and positions is None and _is_step(cache, 1):
            return self._take(tokens, cache)[:, 0]
        return super().next_logits(tokens, positions=positions, cache=cache)

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: CacheView | None = None,
    ) -> Tensor:
        counted = positions is None and documents is None
        if counted and _is_step(cache, tokens.shape[1]):
            return self._take(tokens, cache)
        return super().forward(tokens, positions=positions, documents=documents, cache=cache)

    def _take(self, tokens: Tensor, view: PagedView) -> Tensor:
        rows, seq = tokens.shape
        view.reserve([seq] * rows)
        variant = Variant(layout_of(view), batched=rows > 1, guessed=seq > 1)
        logits = self.fixed_step(variant, tokens, tensors_of(view))
        view.advance(seq)
        return logits


def _is_step(cache: CacheView | None, seq: int) -> TypeGuard[PagedView]:
    if not isinstance(cache, PagedView) or torch.is_grad_enabled():
        return False
    return seq <= cache.slack + 1 and all(one.length for one in cache.sequences)

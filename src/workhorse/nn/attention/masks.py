"""Attention masks, in a form that does not depend on the attention kernel."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from workhorse.nn.shapes import KeyPositions, Mask, Positions, ScoreBias, Tokens


@dataclass(frozen=True)
class AttentionPattern:
    """The keys at positions j that a query at position i may see, and ALiBi's biases.

    Attributes:
        causal: True to see only keys at j <= i.
        window: if given, only keys at j > i - window are visible.
        chunk: if given, only keys in the same chunk of `chunk` positions are visible (Llama 4).
        alibi_slopes: one slope per head; a score is lowered by `slope * |i - j|`. Empty: no ALiBi.
        alibi_scale: factor on ALiBi's biases.
        alibi_bfloat16: True to round ALiBi's biases to bfloat16, as in Falcon; see `AlibiConfig`.
    """

    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    alibi_slopes: tuple[float, ...] = ()
    alibi_scale: float = 1.0
    alibi_bfloat16: bool = False

    @property
    def reach(self) -> int | None:
        """Maximum number of keys that a query sees, including its own position; None: all."""
        limits = [limit for limit in (self.window, self.chunk) if limit is not None]
        return min(limits) if limits else None

    def within(self, length: int) -> "AttentionPattern":
        """Return an equivalent pattern for sequences of up to `length` tokens.

        A window or chunk of at least `length` tokens hides nothing in them, so it is removed.
        """
        window = self.window if self.window is not None and self.window < length else None
        chunk = self.chunk if self.chunk is not None and self.chunk < length else None
        return replace(self, window=window, chunk=chunk)


@dataclass(frozen=True)
class Placement:
    """The positions of the queries and keys in one computation of attention.

    Attributes:
        queries: positions of the queries, -1 for padding.
        keys: positions of the keys, -1 for padding and empty slots.
        documents: document id of each query, or None.
        key_documents: document id of each key; None: queries and keys are the same tokens.
        aligned: True if queries and keys are the same tokens, at positions 0, 1, 2 … in every row,
            without padding.
        last: True if each row has only one query, no key comes after it, and no key is padding.
        in_blocks: True if the keys are in the blocks of a paged cache, where slot n of a row's
            blocks holds position n.
    """

    queries: Positions
    keys: KeyPositions
    documents: Tokens | None = None
    key_documents: Tokens | None = None
    aligned: bool = False
    last: bool = False
    in_blocks: bool = False


def visible(pattern: AttentionPattern, place: Placement) -> Mask:
    """The pattern as a bool mask, True = attend. Padding neither attends nor is attended to."""
    i = place.queries[:, None, :, None]
    j = place.keys[:, None, None, :]
    mask = sees(pattern, i, j)
    if place.documents is not None:
        keys = place.documents if place.key_documents is None else place.key_documents
        mask = mask & (place.documents[:, None, :, None] == keys[:, None, None, :])
    return mask


def sees(pattern: AttentionPattern, i: Tensor, j: Tensor) -> Tensor:
    """True if a query at position i may see a key at j, elementwise; ignores documents."""
    seen = (i >= 0) & (j >= 0)
    if pattern.causal:
        seen = seen & (j <= i)
    if pattern.window is not None:
        seen = seen & (j > i - pattern.window)
    if pattern.chunk is not None:
        seen = seen & (i // pattern.chunk == j // pattern.chunk)
    return seen


def hides_something(pattern: AttentionPattern, place: Placement) -> bool:
    """True if attention needs an explicit mask, because it is more than causal."""
    limited = pattern.window is not None or pattern.chunk is not None
    if place.documents is not None or limited:
        return True
    if place.last:
        return False
    return not place.aligned


def alibi_bias(pattern: AttentionPattern, place: Placement) -> ScoreBias:
    """ALiBi's biases in float32: `-slope * |i - j|`.

    With `alibi_bfloat16` it is `slope * j`, rounded as in Falcon's training. For keys j up to the
    query i, this differs from `-slope * |i - j|` by a constant, which the softmax removes.
    """
    slopes = alibi_slope_column(pattern, place.keys.device)
    i = place.queries[:, None, :, None]
    j = place.keys[:, None, None, :]
    if pattern.alibi_bfloat16:
        return (slopes.bfloat16() * j.clamp(min=0)).float() * pattern.alibi_scale
    return slopes * -(i - j).abs() * pattern.alibi_scale


def slopes_of_distance(pattern: AttentionPattern) -> Float[Tensor, " heads"] | None:
    """The slopes s of biases `-s * (i - j)`, for kernels that compute them from positions.

    None without biases, for biases of an encoder, and for biases rounded to bfloat16.
    """
    if not pattern.alibi_slopes or not pattern.causal or pattern.alibi_bfloat16:
        return None
    return torch.tensor(pattern.alibi_slopes) * pattern.alibi_scale


def alibi_slope_column(
    pattern: AttentionPattern, device: torch.device
) -> Float[Tensor, "1 heads 1 1"]:
    """ALiBi's slopes as a tensor that broadcasts over attention scores."""
    return torch.tensor(pattern.alibi_slopes, device=device)[None, :, None, None]

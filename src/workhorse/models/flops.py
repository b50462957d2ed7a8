"""The arithmetic of a decoder, by component, from its shapes."""

from collections import Counter
from collections.abc import Iterable
from typing import cast

from torch import nn

from workhorse.nn import Decoder
from workhorse.nn.attention.self_attention import SelfAttention
from workhorse.nn.experts.grouped_linear import GroupedLinear
from workhorse.nn.experts.mixture import MixtureOfExperts

FLOPS_PER_PARAMETER = 6
"""Of training, for each token: two of the forward pass, four of the backward pass."""
SCORES = "scores"
"""The component of the attention's own products, without its projections."""


def forward_flops(decoder: Decoder, seq_len: int) -> dict[str, int]:
    """Floating-point operations of the forward pass, for each token of a text, by component.

    Two for each weight that multiplies (in a mixture those of `top_k` experts), and in each layer
    `2 · heads · (head_dim + value_dim) · keys` for scores and outputs of the attention. `keys` is
    `seq_len`, or the window or chunk if that is smaller: keys that a causal mask hides count, as in
    PaLM (2204.02311 appendix B), and those that a window hides do not. Look-ups, norms,
    activations, short convolutions and the softmax do not count. PyTorch's counter gives the same,
    except for windows and chunks.

    Args:
        decoder: on any device, `meta` among them.
        seq_len: of the text, in tokens.

    Returns:
        The operations of `embedding` (its projections), `attention` (its projections), `scores`,
        `feed_forward` and `head`; components without any are left out.
    """
    flops: Counter[str] = Counter()
    for path, module in cast(Iterable[tuple[str, nn.Module]], decoder.named_modules()):
        parts = path.split(".")
        component = parts[2] if parts[0] == "layers" and len(parts) > 2 else parts[0]  # noqa: PLR2004
        if isinstance(module, nn.Linear):
            flops[component] += 2 * module.weight.numel()
        elif isinstance(module, MixtureOfExperts):
            flops[component] += 2 * _multiplied(module)
        elif isinstance(module, SelfAttention):
            keys = min(seq_len, module.pattern.reach or seq_len)
            flops[SCORES] += 2 * module.n_heads * (module.head_dim + module.value_dim) * keys
    return dict(flops)


def flops_per_token(decoder: Decoder, seq_len: int) -> int:
    """Floating-point operations to train on one token: three times those of `forward_flops`.

    The backward pass multiplies twice as much. What is recomputed does not count, nor does the
    optimizer.
    """
    return 3 * sum(forward_flops(decoder, seq_len).values())


def _multiplied(mixture: MixtureOfExperts) -> int:
    """Weights of a mixture's experts that multiply one token."""
    stacks = [part for part in mixture.experts.modules() if isinstance(part, GroupedLinear)]
    matrices = sum(stack.weight.numel() for stack in stacks)
    return matrices * mixture.router.top_k // mixture.router.n_experts

"""Whether a module has hooks, so that it must be called for what it computes."""

# PyTorch has no public question for it.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

from torch import nn
from torch.nn.modules import module as modules


def watched(*parts: nn.Module) -> bool:
    """Whether any of these modules has a hook, or there is a global one.

    Code that computes several modules at once, and so calls none of them, asks this first.
    """
    if modules._has_any_global_hook():
        return True
    return any(
        part._forward_hooks
        or part._forward_pre_hooks
        or part._backward_hooks
        or part._backward_pre_hooks
        for part in parts
    )

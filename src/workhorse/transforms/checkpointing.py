"""Layers that compute their activations again in the backward pass, and so keep none of them."""

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from workhorse.nn import Decoder
from workhorse.transforms.record import check, record
from workhorse.transforms.replace import become, combined


class Checkpointed(nn.Module):
    """Before a class of layers: its forward pass, which keeps its inputs alone."""

    def forward(self, *given: Any) -> Tensor:
        return checkpoint(super().forward, *given, use_reentrant=False)  # type: ignore[return-value]


def checkpoint_activations(decoder: Decoder) -> None:
    """Let every layer of a decoder compute its activations again in the backward pass."""
    check(decoder, "checkpoint_activations")
    for name, layer in list(decoder.layers.named_children()):
        kind = combined("Checkpointed", Checkpointed, type(layer))
        decoder.layers.set_submodule(name, become(layer, kind))
    record(decoder, "checkpoint_activations")

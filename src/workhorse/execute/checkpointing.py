"""Activation checkpointing: layers that compute their activations again in the backward pass."""

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from workhorse.nn import Decoder
from workhorse.transforms.replace import become, combined


class Checkpointed(nn.Module):
    """A mixin for a class of layers whose forward pass keeps only its inputs."""

    def forward(self, *inputs: Any) -> Tensor:
        return checkpoint(super().forward, *inputs, use_reentrant=False)  # type: ignore[return-value]


def checkpoint_activations(decoder: Decoder) -> None:
    """Let every layer of a decoder compute its activations again in the backward pass."""
    for name, layer in list(decoder.layers.named_children()):
        kind = combined("Checkpointed", Checkpointed, type(layer))
        decoder.layers.set_submodule(name, become(layer, kind))

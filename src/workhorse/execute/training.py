"""Activation checkpointing for training, and compilation of layers and loss by PyTorch.

An uncompiled loss makes a GPU read and write all logits a dozen times, mostly in float32.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from workhorse.nn import Decoder
from workhorse.nn.logprobs import HeadLoss, Shaping, TokenLogprobs, score
from workhorse.nn.surgery import HookWatch, as_subclass, mixin_class, replace_modules


class Checkpointed(nn.Module):
    """A mixin for layers with activation checkpointing: only the layer's inputs are stored."""

    def forward(self, *inputs: Any) -> Tensor:
        return checkpoint(super().forward, *inputs, use_reentrant=False)  # type: ignore[return-value]


def checkpoint_activations(decoder: Decoder) -> None:
    """Enable activation checkpointing in every layer: the backward pass recomputes activations."""
    for name, layer in list(decoder.layers.named_children()):
        kind = mixin_class("Checkpointed", Checkpointed, type(layer))
        decoder.layers.set_submodule(name, as_subclass(layer, kind))


class Compiled(nn.Module):
    """A mixin for compiled layers. A layer with hooks added after compilation runs uncompiled."""

    watch: HookWatch

    def __call__(self, *inputs: Any) -> Any:
        # The compiler does not check for hooks that were registered after it compiled.
        return self._call_impl(*inputs) if self.watch.sees_hooks else super().__call__(*inputs)


def compile_layers(decoder: Decoder) -> None:
    """Make PyTorch compile each layer of a decoder at its first run, in place.

    Equal layers share one compiled program.

    Args:
        decoder: the decoder, after every other transform.
    """
    for name, layer in list(decoder.layers.named_children()):
        kind = mixin_class("Compiled", Compiled, type(layer))
        compiled = as_subclass(layer, kind, watch=HookWatch(layer.modules(), from_now=True))
        compiled.compile()
        decoder.layers.set_submodule(name, compiled)


def compile_logprobs(objective: nn.Module) -> None:
    """Make PyTorch compile the log-probabilities of a training objective, in place.

    Modules that already use native operators, or that are divided among ranks, are not changed.
    """

    def choose(module: nn.Module) -> nn.Module:
        if type(module) not in (HeadLoss, TokenLogprobs):
            return module
        return as_subclass(module, mixin_class("Compiled", CompiledLogprobs, type(module)))

    replace_modules(objective, choose)


class CompiledLogprobs(TokenLogprobs):
    """`TokenLogprobs` whose function of the logits, `score`, is compiled by PyTorch."""

    def score(
        self, logits: Tensor, targets: Tensor, coefficients: Tensor | None, shaping: Shaping
    ) -> Tensor:
        for rows in (logits, targets, coefficients):  # the last chunk has fewer rows
            if rows is not None:  # one row has its own program
                torch._dynamo.maybe_mark_dynamic(rows, 0)
        return _compiled()(logits, targets, coefficients, shaping=shaping, entropy=self.entropy)


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(score)

"""Activations that the native operators compute."""

from torch import nn

from workhorse.native.blocks import ActivationName
from workhorse.nn.feedforward import ReluSquared

NATIVE_ACTIVATIONS: dict[type[nn.Module], ActivationName] = {
    nn.ReLU: "relu",
    ReluSquared: "relu2",
    nn.GELU: "gelu",
    nn.SiLU: "silu",
    nn.Sigmoid: "sigmoid",
}
"""Name of each activation in the native operators, by exact module class.

GELU's tanh approximation has another name; see `activation_name`.
"""


def activation_name(module: nn.Module) -> ActivationName | None:
    """Name of an activation in the native operators; None if they do not compute it."""
    if type(module) is nn.GELU and module.approximate == "tanh":
        return "gelu_tanh"
    return NATIVE_ACTIVATIONS.get(type(module))

"""Layers of a decoder that is trained, compiled by PyTorch: `train.compile: true`."""

from workhorse.nn import Decoder


def compile_layers(decoder: Decoder) -> None:
    """Compile each layer of a decoder, in place, at its first run; equal layers share a program.

    Args:
        decoder: after every other transform.
    """
    for layer in decoder.layers:
        layer.compile()

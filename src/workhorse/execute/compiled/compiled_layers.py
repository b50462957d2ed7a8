"""Layers of a decoder that is trained, compiled by PyTorch: `train.compile: true`."""

from workhorse.nn import Decoder
from workhorse.transforms.record import check, record


def compile_layers(decoder: Decoder) -> None:
    """Compile each layer of a decoder, in place, at its first run; equal layers share a program.

    Args:
        decoder: after every other transform.
    """
    check(decoder, "compile_layers")
    for layer in decoder.layers:
        layer.compile()
    record(decoder, "compile_layers")

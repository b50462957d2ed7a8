"""Everything that makes a loaded decoder quick, in its order."""

from workhorse.nn import Decoder
from workhorse.transforms.compiled_step import compile_steps
from workhorse.transforms.native_attention import attend_natively
from workhorse.transforms.stream import stream_weights


def prepare_for_inference(decoder: Decoder, *, compile: bool = False) -> Decoder:
    """Transform a decoder, in place but for itself, on the device and in the type it will run in.

    Args:
        decoder: in evaluation mode; quantised already, if it shall be.
        compile: decode by compiled steps; see `compile_steps`. On a CPU the native operators are
            then waited for too; otherwise they are used if they are there, and else made for the
            next time.

    Returns:
        The decoder that takes its place: itself unless it is compiled.

    Raises:
        WorkhorseError: a decoder that cannot be compiled.
    """
    on_cpu = next(decoder.parameters()).device.type == "cpu"
    if on_cpu and stream_weights(decoder, wait=compile):
        attend_natively(decoder)
    return compile_steps(decoder) if compile else decoder

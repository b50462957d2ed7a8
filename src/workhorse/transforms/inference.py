"""Everything that makes a loaded decoder quick, in its order."""

from workhorse.native import Operators, resolve
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
    operators = resolve("decoding", "matrix_unit", wait=compile) if on_cpu else Operators()
    if operators.decoding is not None:
        stream_weights(decoder, operators)
        attend_natively(decoder, operators.decoding)
    return compile_steps(decoder) if compile else decoder

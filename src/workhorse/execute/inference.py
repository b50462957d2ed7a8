"""The transforms that make a loaded decoder fast, in their order."""

from workhorse.execute.compiled.captured_step import capture_steps
from workhorse.execute.compiled.compiled_step import compile_steps
from workhorse.execute.native_decoding.attention import attend_natively
from workhorse.execute.native_decoding.native_step import step_natively
from workhorse.execute.native_decoding.stream import stream_weights
from workhorse.native import Operators, resolve
from workhorse.nn import Decoder


def prepare_for_inference(decoder: Decoder, *, compile: bool = False) -> Decoder:
    """Prepare a decoder for inference; its modules are replaced in place.

    Args:
        decoder: in evaluation mode, quantised if it is to be, on the device and in the dtype that
            it will run in.
        compile: decode by compiled steps (see `compile_steps`) where there are no native ones, on
            CUDA replayed from graphs (see `capture_steps`). On a CPU this also waits until the
            native operators are compiled; otherwise they are used if they are there, and compiled
            in the background for the next start.

    Returns:
        The decoder to use in place of the one given.

    Raises:
        WorkhorseError: the decoder cannot be compiled.
    """
    device_type = next(decoder.parameters()).device.type
    operators = (
        resolve("decoding", "steps", "matrix_unit", "vectors", wait=compile)
        if device_type == "cpu"
        else Operators()
    )
    if operators.decoding is not None:
        stream_weights(decoder, operators)
        attend_natively(decoder, operators.decoding)
    if compile:
        decoder = compile_steps(decoder)
        if device_type == "cuda":
            decoder = capture_steps(decoder)
    return decoder if operators.steps is None else step_natively(decoder, operators)

"""What this machine can run, asked once for all tests that need one of its operators."""

from typing import Any

import pytest

from workhorse.instructions import cpu_has
from workhorse.native import Library, resolve
from workhorse.nn import Decoder
from workhorse.transforms.native_attention import attend_natively
from workhorse.transforms.stream import stream_weights

OPERATORS = resolve("decoding", "matrix_unit", "training", wait=True)
# Where one is None, what uses it is skipped by `needs`.
DECODING: Any = OPERATORS.decoding
MATRIX_UNIT: Any = OPERATORS.matrix_unit
TRAINING: Any = OPERATORS.training


def decode_natively(decoder: Decoder) -> None:
    """Let a decoder use the operators of decoding, or skip the test that asks for it."""
    if OPERATORS.decoding is None:
        pytest.skip(OPERATORS.why_not["decoding"])
    stream_weights(decoder, OPERATORS)
    attend_natively(decoder, OPERATORS.decoding)


needs_vectors = pytest.mark.skipif(
    TRAINING is None or not cpu_has("avx512_f"), reason="the CPU has no vectors of 64 bytes"
)


def needs(library: Library) -> pytest.MarkDecorator:
    """For tests of what is not everywhere."""
    return pytest.mark.skipif(
        library in OPERATORS.why_not, reason=OPERATORS.why_not.get(library, "")
    )

"""Native operators of this machine, resolved once for all tests that need one."""

from dataclasses import replace
from typing import Any

import pytest

from workhorse.execute.backend import Backend, ModuleBackend
from workhorse.execute.native_decoding.layers import attend_natively, stream_weights
from workhorse.execute.native_decoding.native_step import NativeStepBackend
from workhorse.native import Library, resolve
from workhorse.nn import Decoder

OPERATORS = resolve("decoding", "matrix_unit", "steps", "training", "vectors", wait=True)
WITHOUT_SCORES = replace(OPERATORS, training=None)
"""The operators of a backend whose `scores` are PyTorch's."""
# If one is None, `needs` skips the tests that use it.
DECODING: Any = OPERATORS.decoding
MATRIX_UNIT: Any = OPERATORS.matrix_unit
TRAINING: Any = OPERATORS.training
VECTORS: Any = OPERATORS.vectors


def decode_natively(decoder: Decoder, *, exact: bool = False) -> Backend:
    """A backend that uses the decoding operators; skips the test if there are none."""
    if OPERATORS.decoding is None:
        pytest.skip(OPERATORS.why_not["decoding"])
    stream_weights(decoder, OPERATORS)
    attend_natively(decoder, OPERATORS.decoding)
    modules = ModuleBackend(decoder, WITHOUT_SCORES)
    if OPERATORS.steps is None:
        return modules
    return NativeStepBackend(modules, WITHOUT_SCORES, exact=exact)


def needs(library: Library) -> pytest.MarkDecorator:
    """Mark tests that need a library which not every machine has."""
    return pytest.mark.skipif(
        library in OPERATORS.why_not, reason=OPERATORS.why_not.get(library, "")
    )

"""What this machine can run, asked once for all tests that need one of its operators."""

from typing import Any

import pytest

from workhorse.native import Library, resolve

OPERATORS = resolve("decoding", "matrix_unit", "training", wait=True)
# Where one is None, what uses it is skipped by `needs`.
DECODING: Any = OPERATORS.decoding
MATRIX_UNIT: Any = OPERATORS.matrix_unit
TRAINING: Any = OPERATORS.training


def needs(library: Library) -> pytest.MarkDecorator:
    """For tests of what is not everywhere."""
    return pytest.mark.skipif(
        library in OPERATORS.why_not, reason=OPERATORS.why_not.get(library, "")
    )

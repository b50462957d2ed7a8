"""Operators in C++ for decoding, training and matrix products on a CPU, if there is a compiler.

They are optional: every user of an operator also has a plain implementation. The code that builds a
model or a step asks `resolve` once for the operators of this machine and passes them on.
"""

from workhorse.native.decoding import Decoding
from workhorse.native.matrix_unit import MatrixUnit
from workhorse.native.operators import Library, Operators, resolve
from workhorse.native.steps import Steps
from workhorse.native.training import Training
from workhorse.native.vectors import Vectors

__all__ = [
    "Decoding",
    "Library",
    "MatrixUnit",
    "Operators",
    "Steps",
    "Training",
    "Vectors",
    "resolve",
]

"""Optional C++ operators for decoding, training and matmuls on a CPU; they need a C++ compiler.

Every computation also works without them, in PyTorch. Code that builds a model or a step calls
`resolve` once, which returns the operators that this machine can run.
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

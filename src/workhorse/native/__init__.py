"""Operators in C++ that read weights at the speed of memory, where a compiler and the CPU allow.

Nothing depends on them: what uses one has a plain way of its own. Whoever builds a model or a step
asks `resolve` once for the operators that there are, and hands them to what computes.
"""

from workhorse.native.decoding import Decoding
from workhorse.native.matrix_unit import MatrixUnit
from workhorse.native.operators import Library, Operators, resolve
from workhorse.native.training import Training

__all__ = ["Decoding", "Library", "MatrixUnit", "Operators", "Training", "resolve"]

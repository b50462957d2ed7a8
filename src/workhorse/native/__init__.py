"""Operators in C++ that read weights at the speed of memory, where a compiler and the CPU allow.

Nothing depends on them: what uses one has a plain way of its own, and asks `load` first.
"""

from workhorse.native.operators import (
    attend,
    finds_likeliest,
    likeliest,
    linear,
    linear_each,
    load,
    packed_linear,
    packs,
    why_not,
)

__all__ = [
    "attend",
    "finds_likeliest",
    "likeliest",
    "linear",
    "linear_each",
    "load",
    "packed_linear",
    "packs",
    "why_not",
]

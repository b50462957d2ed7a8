"""bfloat16 is rounded as PyTorch rounds it, with the instruction for it and without."""

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from workhorse.instructions import LEVELS, levels_here
from workhorse.native import build

SOURCE = """
#include "simd/vectors.h"
using namespace workhorse;
extern "C" void by_vectors(const float* from, U16x16* to, int64_t vectors) {
  for (int64_t i = 0; i < vectors; i++) {
    const U16x16 rounded = round(widen(from + 16 * i));
    std::memcpy(to + i, &rounded, sizeof rounded);
  }
}
extern "C" void one_by_one(const float* from, BFloat16* to, int64_t vectors) {
  for (int64_t i = 0; i < 16 * vectors; i++) store(to + i, from[i]);
}
"""


@pytest.mark.parametrize("level", sorted({*levels_here()[:1], *levels_here()[-1:]}))
def test_every_number_is_rounded_as_pytorch_rounds_it(level: str, tmp_path: Path) -> None:
    """Every upper half with lower halves about a tie; NaN above all, whose sum would carry over."""
    try:
        compiler = build._compiler()
    except build.Unavailable as reason:
        pytest.skip(str(reason))
    source, library = tmp_path / "rounding.cpp", tmp_path / "rounding.so"
    source.write_text(SOURCE)
    flags = ("-O1", "-std=c++20", "-fPIC", "-shared", *LEVELS[level].flags)
    include = f"-I{Path(build.__file__).parent}"
    subprocess.run([compiler, *flags, include, source, "-o", library], check=True)
    rounding = ctypes.CDLL(str(library))

    upper = np.arange(2**16, dtype=np.uint32) << 16
    numbers = np.stack([upper + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    magnitude = numbers & 0x7FFFFFFF
    numbers = numbers[(magnitude == 0) | (magnitude >= 2**23)]  # the instruction drops denormals
    numbers = np.resize(numbers, len(numbers) // 16 * 16 + 16)
    expected = torch.from_numpy(numbers.view(np.float32)).bfloat16()
    for function in (rounding.by_vectors, rounding.one_by_one):
        found = np.empty(len(numbers), np.int16)
        function(
            ctypes.c_void_p(numbers.ctypes.data),
            ctypes.c_void_p(found.ctypes.data),
            ctypes.c_int64(len(numbers) // 16),
        )
        rounded = torch.from_numpy(found).view(torch.bfloat16)
        assert torch.equal(rounded.isnan(), expected.isnan())
        numeric = ~expected.isnan()
        assert torch.equal(rounded[numeric].view(torch.int16), expected[numeric].view(torch.int16))

"""bfloat16 is rounded as in PyTorch, with and without bfloat16 instructions."""

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from workhorse.devices import instructions
from workhorse.devices.instructions import LEVELS, levels_here
from workhorse.native import build

SOURCE = """
#include "ops/training/weights.h"
#include "simd/elementwise.h"
using namespace workhorse;
extern "C" void by_vectors(const float* from, U16x16* to, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const U16x16 rounded = round(widen(from + i));
    std::memcpy(to + i / 16, &rounded, sizeof rounded);
  }
}
extern "C" void by_pairs(const float* from, uint16_t* to, int64_t n) {
#ifdef __AVX512BF16__
  for (int64_t i = 0; i < n; i += 32)
    _mm512_storeu_si512(to + i, round(widen(from + i), widen(from + i + 16)));
#else
  for (int64_t i = 0; i < n; i += 32)
    for (int j = 0; j < 32; j += 16) {
      const U16x16 rounded = round(widen(from + i + j));
      std::memcpy(to + i + j, &rounded, sizeof rounded);
    }
#endif
}
extern "C" void one_by_one(const float* from, BFloat16* to, int64_t n) {
  for (int64_t i = 0; i < n; i++) store(to + i, from[i]);
}
extern "C" void as_weights(const float* from, uint16_t* to, int64_t n) {
  for (int64_t i = 0; i < n; i++) weights::Narrow{to}.write(i, from[i]);
}
extern "C" void split(const float* from, uint16_t* upper, int16_t* low_bits, int64_t n) {
  for (int64_t i = 0; i < n; i++) weights::Split{upper, low_bits}.write(i, from[i]);
}
extern "C" void join(uint16_t* upper, int16_t* low_bits, float* to, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = weights::Split{upper, low_bits}.read(i);
}
"""
BY_INSTRUCTION = {"by_vectors", "by_pairs"}


def numbers() -> np.ndarray:
    """Every upper half with lower halves near a tie, including every NaN, infinity and subnormal.

    Rounding by addition would turn some NaNs into zeros.
    """
    upper = np.arange(2**16, dtype=np.uint32) << 16
    lows = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234)
    made = np.stack([upper + low for low in lows]).flatten()
    return np.resize(made, (len(made) + 31) // 32 * 32)


@pytest.fixture(scope="module", params=levels_here())
def level(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def rounding(level: str, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The functions above, compiled for one instruction set."""
    try:
        compiler = build._compiler()
    except build.Unavailable as reason:
        pytest.skip(str(reason))
    folder = tmp_path_factory.mktemp("rounding")
    source, library = folder / "rounding.cpp", folder / "rounding.so"
    source.write_text(SOURCE)
    flags = ("-O3", "-fno-math-errno", "-std=c++20", "-fPIC", "-shared", "-Wno-psabi")
    include = f"-I{Path(build.__file__).parent}"
    command = [compiler, *flags, *LEVELS[level].flags, include, source, "-o", library]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@pytest.mark.parametrize("function", ["by_vectors", "by_pairs", "one_by_one", "as_weights"])
def test_every_number_is_rounded_as_pytorch_rounds_it(
    rounding: ctypes.CDLL, level: str, function: str
) -> None:
    given = numbers()
    found = np.empty(len(given), np.int16)
    getattr(rounding, function)(address(given), address(found), ctypes.c_int64(len(given)))
    expected = torch.from_numpy(given.view(np.float32)).bfloat16()
    if "avx512_bf16" in instructions._up_to(level) and function in BY_INSTRUCTION:
        subnormal = torch.from_numpy((given & 0x7FFFFFFF) < 2**23)
        expected = torch.where(subnormal, torch.zeros_like(expected).copysign(expected), expected)
    assert_same(torch.from_numpy(found).view(torch.bfloat16), expected)


def test_splitting_a_number_and_joining_its_parts_gives_the_number(rounding: ctypes.CDLL) -> None:
    given = numbers()
    upper, low_bits = np.empty(len(given), np.uint16), np.empty(len(given), np.int16)
    joined, count = np.empty(len(given), np.float32), ctypes.c_int64(len(given))
    rounding.split(address(given), address(upper), address(low_bits), count)
    rounding.join(address(upper), address(low_bits), address(joined), count)
    exact = torch.from_numpy(given.view(np.float32))
    assert_same(torch.from_numpy(joined), exact)
    nan = torch.from_numpy(upper.view(np.int16)).view(torch.bfloat16).isnan()
    assert torch.equal(nan, exact.isnan())  # also in the part that the model stores


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Check for equal bits, except the payload of NaNs."""
    bits = torch.int16 if found.dtype == torch.bfloat16 else torch.int32
    assert torch.equal(found.isnan(), expected.isnan())
    numeric = ~expected.isnan()
    assert torch.equal(found[numeric].view(bits), expected[numeric].view(bits))

// Dot products of rows, summed in float32.
#pragma once

#include "simd/bf16.h"

namespace workhorse {

template <class T>
struct Dot;  // `step` numbers of a row times as many of another, onto a vector of partial sums

template <>
struct Dot<float> {
  static constexpr int step = 16;
  static F32x16 add(F32x16 acc, const float* w, const float* x) {
    return acc + load<F32x16>(w) * load<F32x16>(x);
  }
};

template <>
struct Dot<BFloat16> {
#ifdef __AVX512BF16__
  static constexpr int step = 32;
  static F32x16 add(F32x16 acc, const BFloat16* w, const BFloat16* x) {
    return (F32x16)_mm512_dpbf16_ps((__m512)acc, load<__m512bh>(w), load<__m512bh>(x));
  }
#else
  static constexpr int step = 16;
  static F32x16 add(F32x16 acc, const BFloat16* w, const BFloat16* x) {
    return acc + widen(w) * widen(x);
  }
#endif
};

}  // namespace workhorse

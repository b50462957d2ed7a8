// Dot products of rows, summed in float32.
#pragma once

#include <type_traits>

#include "simd/bf16.h"
#include "simd/subnormals.h"

namespace workhorse {

// Whether single rows, for which widening does not pay, are nevertheless multiplied by pairs.
#ifdef __AVX512BF16__
constexpr bool kMixesPairs = !kPairs;
#else
constexpr bool kMixesPairs = false;
#endif

// `step` numbers of a row times as many of another, onto a vector of partial sums. `Reused`: whether the numbers are
// multiplied by several rows, so that widening them pays where pairs are slow. Either has the same bits while a
// `Rounding` lives.
template <class T>
struct Dot;

template <>
struct Dot<float> {
  struct Rounding {};
  static constexpr int step = 16;
  template <bool Reused = false>
  static F32x16 add(F32x16 acc, const float* w, const float* x) {
    return fma(load<F32x16>(w), load<F32x16>(x), acc);
  }
};

template <>
struct Dot<BFloat16> {
  using Rounding = std::conditional_t<kMixesPairs, TakingSubnormalsForZero, Dot<float>::Rounding>;
  static constexpr int step = 32;
  template <bool Reused = false>
  static F32x16 add(F32x16 acc, const BFloat16* w, const BFloat16* x) {
#ifdef __AVX512BF16__
    if constexpr (kPairs || !Reused)
      return (F32x16)_mm512_dpbf16_ps((__m512)acc, load<__m512bh>(w), load<__m512bh>(x));
#endif
    // In the order of that instruction on Intel's CPUs.
    const auto a = load<U32x16>(w), b = load<U32x16>(x);
    return fma(firsts(a), firsts(b), fma(seconds(a), seconds(b), acc));
  }
};

}  // namespace workhorse

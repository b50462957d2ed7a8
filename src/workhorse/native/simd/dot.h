// Dot products of rows, summed in float32.
#pragma once

#include <type_traits>

#include "simd/bf16.h"
#include "simd/subnormals.h"

namespace workhorse {

// True if single rows, for which widening is not faster, are multiplied by pairs all the same.
#ifdef __AVX512BF16__
constexpr bool kMixesPairs = !kPairs;
#else
constexpr bool kMixesPairs = false;
#endif

// Adds the products of `step` elements of two rows to a vector of partial sums. `Reused`: true if several rows are
// multiplied by the same elements, so that widening them is faster where pairs are slow. Both ways give the same bits
// while a `Rounding` exists.
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
    // In the order in which that instruction adds on Intel CPUs.
    const auto a = load<U32x16>(w), b = load<U32x16>(x);
    return fma(firsts(a), firsts(b), fma(seconds(a), seconds(b), acc));
  }
};

}  // namespace workhorse

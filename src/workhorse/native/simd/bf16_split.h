// Numbers of float32 as sums of two of bfloat16, which the matrix unit can multiply.
//
//   x ≈ upper + lower
//   x y ≈ lower(x) upper(y) + upper(x) upper(y) + upper(x) lower(y)
//
// Each half has 8 bits, so a number is off by at most 2^-17 of itself, and with the product of the lower
// halves, which is left out, a product by less than 2^-15; in sums most of that cancels. This is what
// PyTorch calls "high" precision of float32 products.
//
// What is not finite has a lower half alone: with a finite number's halves it gives what it gives with the
// number, where infinity as an upper half would meet a lower half of 0 and give NaN. Two infinities give
// NaN. The unit takes numbers below 2^-126 for 0, halves too.
#pragma once

#include "simd/vectors.h"

namespace workhorse {

#ifdef __AVX512BF16__

struct Halves {
  __m512 upper, lower;
};

// Of finite numbers that do not round to infinity; of others the lower half is not finite.
inline Halves halves(__m512 x) {
  const __m512i up = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
  const __m512i cut = _mm512_and_si512(up, _mm512_set1_epi32(0xffff0000));
  const __m512 upper = _mm512_castsi512_ps(cut);
  return {upper, _mm512_sub_ps(x, upper)};
}

// Of any numbers: large ones are cut and not rounded.
inline Halves any_halves(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x), size = _mm512_add_epi32(bits, bits);
  const __mmask16 small = _mm512_cmplt_epu32_mask(size, _mm512_set1_epi32(0xfeff0000));
  const __mmask16 finite = _mm512_cmplt_epu32_mask(size, _mm512_set1_epi32(0xff000000));
  const __m512i up = _mm512_mask_add_epi32(bits, small, bits, _mm512_set1_epi32(0x8000));
  const __m512i cut = _mm512_maskz_and_epi32(finite, up, _mm512_set1_epi32(0xffff0000));
  const __m512 upper = _mm512_castsi512_ps(cut);
  return {upper, _mm512_sub_ps(x, upper)};
}

// 16 rows of 32 numbers, which `load` gives by row and half of a row; `store` gets each row's upper and
// lower halves in bfloat16.
template <class Load, class Store>
inline void split(const Load& load, const Store& store) {
  const auto round = [&](int row, const Halves& a, const Halves& b) {
    store(row, (__m512i)_mm512_cvtne2ps_pbh(b.upper, a.upper),
          (__m512i)_mm512_cvtne2ps_pbh(b.lower, a.lower));
  };
  __m512 check = _mm512_setzero_ps();  // NaN as soon as a lower half is not finite
  for (int i = 0; i < 16; i++) {
    const Halves a = halves(load(i, 0)), b = halves(load(i, 1));
    check = _mm512_fmadd_ps(_mm512_add_ps(a.lower, b.lower), _mm512_setzero_ps(), check);
    round(i, a, b);
  }
  if (_mm512_cmp_ps_mask(check, check, _CMP_UNORD_Q))
    for (int i = 0; i < 16; i++) round(i, any_halves(load(i, 0)), any_halves(load(i, 1)));
}

#endif

}  // namespace workhorse

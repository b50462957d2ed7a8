// float32 values as sums of two bfloat16 values, which the matrix unit can multiply.
//
//   x ≈ upper + lower
//   x y ≈ lower(x) upper(y) + upper(x) upper(y) + upper(x) lower(y)
//
// Each part has 8 bits, so a value has a relative error of at most 2^-17. A product, which omits the product of the
// lower parts, has an error of less than 2^-15; in sums most of it cancels. PyTorch calls this "high" precision
// of float32 matmuls.
//
// A value that is not finite is stored only in the lower part. Multiplied by the parts of a finite value, this gives
// the correct result, whereas an infinite upper part times a lower part of 0 would give NaN. The product of two
// infinities is NaN. The unit flushes values below 2^-126 to 0, including parts.
#pragma once

#include "simd/bf16.h"

namespace workhorse {

#ifdef __AVX512BF16__

struct Bf16Split {
  __m512 upper, lower;
};

// For finite values that do not round to infinity; for others the lower part is not finite.
inline Bf16Split split_finite(__m512 x) {
  const __m512i up = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
  const __m512i cut = _mm512_and_si512(up, _mm512_set1_epi32(0xffff0000));
  const __m512 upper = _mm512_castsi512_ps(cut);
  return {upper, _mm512_sub_ps(x, upper)};
}

// For all values: large ones are truncated instead of rounded.
inline Bf16Split split_any(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x), size = _mm512_add_epi32(bits, bits);
  const __mmask16 small = _mm512_cmplt_epu32_mask(size, _mm512_set1_epi32(0xfeff0000));
  const __mmask16 finite = _mm512_cmplt_epu32_mask(size, _mm512_set1_epi32(0xff000000));
  const __m512i up = _mm512_mask_add_epi32(bits, small, bits, _mm512_set1_epi32(0x8000));
  const __m512i cut = _mm512_maskz_and_epi32(finite, up, _mm512_set1_epi32(0xffff0000));
  const __m512 upper = _mm512_castsi512_ps(cut);
  return {upper, _mm512_sub_ps(x, upper)};
}

// Splits 16 rows of 32 elements. `load` returns a half of a row; `store` receives the upper and lower parts of a row
// in bfloat16.
template <class Load, class Store>
inline void split(const Load& load, const Store& store) {
  const auto write = [&](int row, const Bf16Split& a, const Bf16Split& b) {
    store(row, round((F32x16)a.upper, (F32x16)b.upper), round((F32x16)a.lower, (F32x16)b.lower));
  };
  __m512 check = _mm512_setzero_ps();  // NaN as soon as a lower part is not finite
  for (int i = 0; i < 16; i++) {
    const Bf16Split a = split_finite(load(i, 0)), b = split_finite(load(i, 1));
    check = _mm512_fmadd_ps(_mm512_add_ps(a.lower, b.lower), _mm512_setzero_ps(), check);
    write(i, a, b);
  }
  if (_mm512_cmp_ps_mask(check, check, _CMP_UNORD_Q))
    for (int i = 0; i < 16; i++) write(i, split_any(load(i, 0)), split_any(load(i, 1)));
}

#endif

}  // namespace workhorse

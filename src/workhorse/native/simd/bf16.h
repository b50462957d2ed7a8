// bfloat16, the upper half of a float32. All rounding to bfloat16 is in this file.
#pragma once

#include "simd/vectors.h"

namespace workhorse {

struct BFloat16 {
  uint16_t bits;
};

inline float to_float(float value) { return value; }

inline float to_float(BFloat16 value) {
  uint32_t bits = uint32_t(value.bits) << 16;
  return as<float>(bits);
}

inline F32x16 widen(U16x16 bits) { return (F32x16)(convert<U32x16>(bits) << 16); }

inline F32x16 widen(const BFloat16* from) { return widen(load<U16x16>(from)); }

inline F32x16 widen(const float* from) { return load<F32x16>(from); }

// Splits words of two bfloat16 elements: the first ones, widened to float32, and the second ones.
inline F32x16 firsts(U32x16 pairs) { return as<F32x16>(pairs << 16); }

inline F32x16 seconds(U32x16 pairs) { return as<F32x16>(pairs & 0xffff0000); }

// True if matmuls of many rows multiply pairs of elements with one instruction instead of widening them; see `widens`
// in `workhorse/devices/instructions.py`.
#if defined(__AVX512BF16__) && !defined(WIDEN_BFLOAT16)
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif

// Rounds one float, or each of a vector, to nearest, ties to even, as PyTorch does. The result is in the lower half of
// 32 bits. NaN is handled apart: rounding its bits could carry over and give another value.
template <class Bits, class Float>
inline Bits rounded(Float value) {
  const Bits bits = as<Bits>(value);
  const Bits nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return select(value == value, nearest, Bits{} + 0x7fc0);
}

// The instructions round in the same way, but flush values below 2^-126 to 0.
inline U16x16 round(F32x16 v) {
#ifdef __AVX512BF16__
  return (U16x16)_mm512_cvtneps_pbh((__m512)v);
#else
  return convert<U16x16>(rounded<U32x16>(v));
#endif
}

#ifdef __AVX512BF16__
inline __m512i round(F32x16 low, F32x16 high) {
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}
#endif

inline void store(BFloat16* to, float value) { to->bits = uint16_t(rounded<uint32_t>(value)); }

inline void store(float* to, float value) { *to = value; }

}  // namespace workhorse

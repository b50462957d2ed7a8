// Vectors of 64 bytes and bfloat16, for any CPU: the compiler splits a vector where it must.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace workhorse {

typedef float F32x16 __attribute__((vector_size(64)));
typedef uint32_t U32x16 __attribute__((vector_size(64)));
typedef uint16_t U16x16 __attribute__((vector_size(32)));

struct BFloat16 {
  uint16_t bits;
};

template <class V>
inline V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline F32x16 widen(U16x16 bits) { return (F32x16)(__builtin_convertvector(bits, U32x16) << 16); }

inline F32x16 widen(const BFloat16* from) { return widen(load<U16x16>(from)); }

inline F32x16 widen(const float* from) { return load<F32x16>(from); }

// By halves: one after the other would wait for every addition.
inline float sum(F32x16 v) {
  v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15);
  return (v[0] + v[2]) + (v[1] + v[3]);
}

inline float to_float(float value) { return value; }

inline float to_float(BFloat16 value) {
  uint32_t bits = uint32_t(value.bits) << 16;
  return load<float>(&bits);
}

// To nearest, ties to even, as PyTorch rounds; what is not a number stays so.
inline void store(BFloat16* to, float value) {
  uint32_t bits = load<uint32_t>(&value);
  bool nan = (bits & 0x7fffffff) > 0x7f800000;
  to->bits = nan ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

inline void store(float* to, float value) { *to = value; }

inline U16x16 round(F32x16 v) {
#ifdef __AVX512BF16__
  return (U16x16)_mm512_cvtneps_pbh((__m512)v);
#else
  const U32x16 bits = (U32x16)v;
  const U32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector(v == v ? rounded : rounded * 0 + 0x7fc0, U16x16);
#endif
}

// Ask for a line that is read a block of rows later. Into the second cache: the first is small, and
// rows a power of two apart would push each other out of it. Past the end it does nothing.
inline void expect(const void* line) { __builtin_prefetch(line, 0, 2); }

}  // namespace workhorse

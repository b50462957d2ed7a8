// y = x Wᵀ + b with W packed into 4 or 8 bits a weight; x and y are bfloat16 or float32.
//
// The lanes of a vector are 16 outputs, so nothing is summed across lanes. Each block of 16 outputs and
// group of 32 k has 512 bytes of codes (8 bits) or 256 (4 bits), and, in a separate array, 16 scales in
// bfloat16:
//
//   8 bits   vector v, lane o, byte i    is 128 + the level of output o at k = 4 v + i
//   4 bits   vector v, lane o, byte i    holds two codes, k = 8 v + i in the lower half and
//                                        k = 8 v + 4 + i in the upper; `levels[code]` is 128 + the level
//
// x is converted, once per call, to 16-bit integers scaled by the largest magnitude of each group. The
// error is at most 2⁻¹⁶ of that magnitude; rounding to bfloat16 has 2⁻⁹ of each number. One instruction
// multiplies four bytes of W in every lane by four bytes of x and accumulates the products, so a number
// of x is split into two bytes, 256 high + low. Sums begin at -128 Σ x, which cancels the offset of W.
#pragma once

#include <algorithm>

#include "simd/bf16.h"

namespace workhorse::packed_linear {

#ifdef __AVX512VNNI__
#define WORKHORSE_PACKS

constexpr int kLanes = 16;
constexpr int kGroup = 32;
constexpr int kSteps = kGroup / 4;  // vectors of four k

using workhorse::store;  // in addition to those with a mask
using workhorse::widen;

// A mask of the first `count` of 16 lanes.
inline __mmask16 lanes(int64_t count) { return count < kLanes ? (1u << count) - 1 : 0xffff; }

inline F32x16 widen(const BFloat16* from, __mmask16 mask) {
  return widen((U16x16)_mm256_maskz_loadu_epi16(mask, from));
}
inline F32x16 widen(const float* from, __mmask16 mask) {
  return (F32x16)_mm512_maskz_loadu_ps(mask, from);
}
inline void store(BFloat16* to, F32x16 v, __mmask16 mask) {
  _mm256_mask_storeu_epi16(to, mask, (__m256i)round(v));
}
inline void store(float* to, F32x16 v, __mmask16 mask) {
  _mm512_mask_storeu_ps(to, mask, (__m512)v);
}

// One group of a row of x, in fixed point.
struct Fixed {
  float scale;
  int32_t begin[2];                   // -128 Σ of the high and of the low bytes
  int32_t high[kSteps], low[kSteps];  // four bytes in each

  Fixed() {}

  template <class T>
  explicit Fixed(const T* x) {
    const F32x16 v[2] = {widen(x), widen(x + 16)};
    // Compared as integers, the bits of magnitudes have the same order, and NaN is the largest.
    const uint32_t magnitude = _mm512_reduce_max_epu32(_mm512_max_epu32(
        (__m512i)_mm512_abs_ps((__m512)v[0]), (__m512i)_mm512_abs_ps((__m512)v[1])));
    const float largest = load<float>(&magnitude);
    constexpr float most = 127 * 256 + 127;
    const float per_unit = largest > 0 ? most / largest : 0;
    scale = largest / most;
    int32_t sums[2] = {};
    for (int i = 0; i < 2; i++) {
      const __m512i whole = _mm512_cvtps_epi32((__m512)(v[i] * per_unit));
      const __m512i lower = _mm512_srai_epi32(_mm512_slli_epi32(whole, 24), 24);
      const __m512i upper = _mm512_srai_epi32(_mm512_sub_epi32(whole, lower), 8);
      _mm_storeu_si128((__m128i*)(high + 4 * i), _mm512_cvtepi32_epi8(upper));
      _mm_storeu_si128((__m128i*)(low + 4 * i), _mm512_cvtepi32_epi8(lower));
      sums[0] += _mm512_reduce_add_epi32(upper);
      sums[1] += _mm512_reduce_add_epi32(lower);
    }
    for (int i = 0; i < 2; i++) begin[i] = -128 * sums[i];
  }
};

template <int Bits>
struct PackedWeight {
  static constexpr int bytes = kGroup * kLanes * Bits / 8;
  static constexpr int ahead = 2048;  // how many bytes ahead codes are prefetched

  const uint8_t* codes;
  const BFloat16* scales;
  const uint8_t* levels;  // 16 of them, for 4 bits
  int64_t groups;

  const uint8_t* code(int64_t block) const { return codes + block * groups * bytes; }
  const BFloat16* scale(int64_t block) const { return scales + block * groups * kLanes; }
  __m512i table() const {
    return Bits == 4 ? _mm512_broadcast_i32x4(load<__m128i>(levels)) : __m512i{};
  }

  // 128 + the levels of four k, in each lane.
  static __m512i step(const uint8_t* code, int s, __m512i table) {
    if constexpr (Bits == 8) return load<__m512i>(code + 64 * s);
    const __m512i both = load<__m512i>(code + 64 * (s / 2));
    const __m512i half = s % 2 ? _mm512_srli_epi16(both, 4) : both;
    return _mm512_shuffle_epi8(table, _mm512_and_si512(half, _mm512_set1_epi8(15)));
  }

  static void fetch(const uint8_t* code) {
    for (int i = 0; i < bytes; i += 64) expect(code + ahead + i);
  }
};

template <int Bits, class T>
struct PackedLinear {
  PackedWeight<Bits> weight;
  const T *x, *bias;  // bias may be null
  T* y;
  int64_t rows, out;
  Fixed* fixed;  // (rows, groups): x, once it is packed

  // Converts rows [begin, end) of x to integers.
  void pack(int64_t begin, int64_t end) const {
    for (int64_t i = begin * weight.groups; i < end * weight.groups; i++)
      fixed[i] = Fixed(x + i * kGroup);
  }

  // Computes blocks [begin, end) of 16 outputs, for every row of x.
  void run(int64_t begin, int64_t end) const {
    for (int64_t block = begin; block < end; block++) {
      int64_t r = 0;
      for (; r + 4 <= rows; r += 4) sums<4>(block, r);
      switch (rows - r) {
        case 3: sums<3>(block, r); break;
        case 2: sums<2>(block, r); break;
        case 1: sums<1>(block, r); break;
      }
    }
  }

 private:
  template <int R>
  void sums(int64_t block, int64_t r) const {
    const uint8_t* code = weight.code(block);
    const BFloat16* scale = weight.scale(block);
    const Fixed* row = fixed + r * weight.groups;
    const __m512i table = weight.table();
    F32x16 total[R] = {};
    for (int64_t g = 0; g < weight.groups; g++, code += weight.bytes, scale += kLanes) {
      if (r == 0) weight.fetch(code);
      __m512i high[R], low[R];
      for (int i = 0; i < R; i++) {
        high[i] = _mm512_set1_epi32(row[i * weight.groups + g].begin[0]);
        low[i] = _mm512_set1_epi32(row[i * weight.groups + g].begin[1]);
      }
      for (int s = 0; s < kSteps; s++) {
        const __m512i w = weight.step(code, s, table);
        for (int i = 0; i < R; i++) {
          const Fixed& f = row[i * weight.groups + g];
          high[i] = _mm512_dpbusd_epi32(high[i], w, _mm512_set1_epi32(f.high[s]));
          low[i] = _mm512_dpbusd_epi32(low[i], w, _mm512_set1_epi32(f.low[s]));
        }
      }
      const F32x16 s = widen(scale);
      for (int i = 0; i < R; i++) {
        const __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(high[i], 8), low[i]);
        total[i] += (F32x16)_mm512_cvtepi32_ps(whole) * (s * row[i * weight.groups + g].scale);
      }
    }
    const int64_t first = block * kLanes;
    const __mmask16 mask = lanes(out - first);
    const F32x16 add = bias ? widen(bias + first, mask) : F32x16{};
    for (int i = 0; i < R; i++) store(y + (r + i) * out + first, total[i] + add, mask);
  }
};

#endif  // __AVX512VNNI__

}  // namespace workhorse::packed_linear

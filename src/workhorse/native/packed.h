// y = x Wᵀ + b with W packed to 4 or 8 bits a number; x and y are bfloat16.
//
// 16 outputs stand side by side in the lanes of a vector, so nothing is summed across lanes. For each
// block of 16 outputs and each group of 32 k there are 512 bytes of codes (8 bits) or 256 (4 bits), and
// in an array of their own 16 scales in bfloat16:
//
//   8 bits   vector v, lane o, byte i    is 128 + the level of output o at k = 4 v + i
//   4 bits   vector v, lane o, byte i    holds two codes: the lower half is that of k = 8 v + i, the
//                                        upper that of k = 8 v + 4 + i; `levels` has 128 + its level
//
// x is put, once per call, into whole numbers of 16 bits, scaled by the largest of each group: an error
// of at most 2⁻¹⁶ of that one, where bfloat16 itself keeps 2⁻⁹ of each. An instruction multiplies four
// bytes of W in every lane with four of x and adds them up, so x is taken as two bytes, 256 high + low.
// The 128 that W has too much is taken off beforehand: a sum begins at -128 Σ x.
#pragma once

#include <algorithm>
#include <vector>

#include "tiles.h"
#include "transpose.h"
#include "vectors.h"

namespace workhorse {

#ifdef __AVX512VNNI__
#define WORKHORSE_PACKS

constexpr int kLanes = 16;
constexpr int kGroup = 32;
constexpr int kSteps = kGroup / 4;  // vectors of four k
constexpr int kManyRows = 32;       // from where expanding W for the matrix unit pays

// A group of a row of x.
struct Fixed {
  float scale;
  int32_t begin[2];             // -128 Σ of each half
  int32_t high[kSteps], low[kSteps];  // four bytes each

  explicit Fixed(const BFloat16* x) {
    const F32x16 v[2] = {widen(x), widen(x + 16)};
    // As whole numbers magnitudes have the same order, and what is no number is the largest.
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
  static constexpr int ahead = 2048;  // bytes that are asked for before they are needed

  const uint8_t* codes;
  const BFloat16* scales;
  const uint8_t* levels;  // 16, for 4 bits
  int64_t groups;

  const uint8_t* code(int64_t block) const { return codes + block * groups * bytes; }
  const BFloat16* scale(int64_t block) const { return scales + block * groups * kLanes; }
  __m512i table() const {
    return Bits == 4 ? _mm512_broadcast_i32x4(load<__m128i>(levels)) : __m512i{};
  }

  // 128 + levels of four k in each lane.
  static __m512i step(const uint8_t* code, int s, __m512i table) {
    if constexpr (Bits == 8) return load<__m512i>(code + 64 * s);
    const __m512i both = load<__m512i>(code + 64 * (s / 2));
    const __m512i half = s % 2 ? _mm512_srli_epi16(both, 4) : both;
    return _mm512_shuffle_epi8(table, _mm512_and_si512(half, _mm512_set1_epi8(15)));
  }

  static void fetch(const uint8_t* code) {
    for (int i = 0; i < bytes; i += 64) expect(code + ahead + i);
  }

  // A block as 16 rows of bfloat16, `groups * 32` wide.
  void expand(int64_t block, BFloat16* to) const {
    const uint8_t* from = code(block);
    for (int64_t g = 0; g < groups; g++, from += bytes) {
      fetch(from);
      const F32x16 s = widen(scale(block) + g * kLanes);
      const auto level = [&](__m512i four, int i) {
        const __m512i byte = _mm512_and_si512(_mm512_srli_epi32(four, 8 * i), _mm512_set1_epi32(255));
        const F32x16 value = ((F32x16)_mm512_cvtepi32_ps(byte) - 128) * s;
        return _mm512_cvtepu16_epi32((__m256i)round(value));
      };
      __m512i pairs[kGroup / 2];
      for (int v = 0; v < kSteps; v++) {
        const __m512i four = step(from, v, table());
        for (int i = 0; i < 2; i++)
          pairs[2 * v + i] = _mm512_or_si512(
              level(four, 2 * i), _mm512_slli_epi32(level(four, 2 * i + 1), 16));
      }
      transpose(pairs);
      for (int i = 0; i < kLanes; i++)
        std::memcpy(to + (i * groups + g) * kGroup, &pairs[i], sizeof pairs[i]);
    }
  }
};

template <int Bits>
struct PackedLinear {
  PackedWeight<Bits> weight;
  const BFloat16* bias;  // may be null
  BFloat16* y;
  int64_t rows, out;
  std::vector<Fixed> x;  // (rows, groups)

  PackedLinear(PackedWeight<Bits> weight, const BFloat16* x, const BFloat16* bias, BFloat16* y,
               int64_t rows, int64_t out)
      : weight(weight), bias(bias), y(y), rows(rows), out(out) {
    this->x.reserve(rows * weight.groups);
    for (int64_t i = 0; i < rows * weight.groups; i++) this->x.emplace_back(x + i * kGroup);
  }

  // Blocks `begin` to `end` of 16 outputs, of every row of x.
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
    const Fixed* fixed = x.data() + r * weight.groups;
    const __m512i table = weight.table();
    F32x16 total[R] = {};
    for (int64_t g = 0; g < weight.groups; g++, code += weight.bytes, scale += kLanes) {
      if (r == 0) weight.fetch(code);
      __m512i high[R], low[R];
      for (int i = 0; i < R; i++) {
        high[i] = _mm512_set1_epi32(fixed[i * weight.groups + g].begin[0]);
        low[i] = _mm512_set1_epi32(fixed[i * weight.groups + g].begin[1]);
      }
      for (int s = 0; s < kSteps; s++) {
        const __m512i w = weight.step(code, s, table);
        for (int i = 0; i < R; i++) {
          const Fixed& f = fixed[i * weight.groups + g];
          high[i] = _mm512_dpbusd_epi32(high[i], w, _mm512_set1_epi32(f.high[s]));
          low[i] = _mm512_dpbusd_epi32(low[i], w, _mm512_set1_epi32(f.low[s]));
        }
      }
      const F32x16 s = widen(scale);
      for (int i = 0; i < R; i++) {
        const __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(high[i], 8), low[i]);
        total[i] += (F32x16)_mm512_cvtepi32_ps(whole) * (s * fixed[i * weight.groups + g].scale);
      }
    }
    const int64_t first = block * kLanes, last = std::min(first + kLanes, out);
    for (int i = 0; i < R; i++)
      for (int64_t o = first; o < last; o++)
        store(y + (r + i) * out + o, total[i][o - first] + (bias ? to_float(bias[o]) : 0));
  }
};

#endif  // __AVX512VNNI__

}  // namespace workhorse

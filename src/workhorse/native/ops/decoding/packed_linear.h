// y = x Wᵀ + b with W packed into 4 or 8 bits per weight; x and y are bfloat16 or float32.
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
// error is at most 2⁻¹⁶ of that magnitude; rounding to bfloat16 has an error of 2⁻⁹ of each element. Sums begin
// at -128 Σ x, which cancels the offset of W.
#pragma once

#include <algorithm>
#include <cmath>

#include "simd/byte_dots.h"
#include "simd/elementwise.h"

namespace workhorse::packed_linear {

constexpr int kLanes = 16;
constexpr int kGroup = kFactors;
constexpr int kOffset = 128;  // difference between a code and its level

// The first `count` of 16 elements in memory; the others are 0, and their memory is not read.
template <class T>
inline F32x16 read_first(const T* from, int64_t count) {
  if (count >= kLanes) return widen(from);
  T some[kLanes] = {};
  std::copy_n(from, count, some);
  return widen(some);
}

template <class T>
inline void write_first(T* to, F32x16 v, int64_t count) {
  if (count >= kLanes) return write(to, v);
  T some[kLanes];
  write(some, v);
  std::copy_n(some, count, to);
}

// One group of a row of x, in fixed point.
struct Fixed {
  float scale;
  Factors factors;

  Fixed() {}

  template <class T>
  explicit Fixed(const T* x) {
    // Compared as integers, the bits of magnitudes have the same order as the magnitudes, and NaN is the largest.
    uint32_t magnitude = 0;
    for (int k = 0; k < kGroup; k++)
      magnitude = std::max(magnitude, as<uint32_t>(to_float(x[k])) & 0x7fffffff);
    const float largest = as<float>(magnitude), per_unit = largest > 0 ? kMost / largest : 0;
    int16_t whole[kGroup];
    for (int k = 0; k < kGroup; k++) whole[k] = int16_t(int32_t(std::nearbyint(to_float(x[k]) * per_unit)));
    scale = largest / kMost;
    factors = Factors(whole, kOffset);
  }
};

// Converts groups of x to fixed point.
template <class T>
void pack(const T* x, int64_t groups, Fixed* to) {
  for (int64_t g = 0; g < groups; g++) to[g] = Fixed(x + g * kGroup);
}

template <int Bits>
struct PackedWeight {
  static constexpr int bytes = kGroup * kLanes * Bits / 8;

  const uint8_t* codes;
  const BFloat16* scales;
  const uint8_t* levels;  // the 16 levels of 4-bit codes
  int64_t groups;

  const uint8_t* code(int64_t block) const { return codes + block * groups * bytes; }
  const BFloat16* scale(int64_t block) const { return scales + block * groups * kLanes; }
  ByteTable table() const { return Bits == 4 ? ByteTable(levels) : ByteTable(); }

  // 128 + the levels of four k, in each lane.
  static U32x16 step(const uint8_t* code, int s, const ByteTable& table) {
    if constexpr (Bits == 8) return load<U32x16>(code + 64 * s);
    const U32x16 both = load<U32x16>(code + 64 * (s / 2));
    return table((s % 2 ? both >> 4 : both) & 0x0f0f0f0f);
  }

  static void fetch(const uint8_t* code) {
    for (int i = 0; i < bytes; i += 64) expect(code + kStreamAhead + i);
  }
};

template <int Bits, class T>
struct PackedLinear {
  PackedWeight<Bits> weight;
  const T *x, *bias;  // bias may be null
  T* y;
  int64_t rows, out;
  Fixed* fixed;  // (rows, groups): x after packing

  // Converts rows [begin, end) of x.
  void pack(int64_t begin, int64_t end) const {
    const int64_t first = begin * weight.groups;
    packed_linear::pack(x + first * kGroup, (end - begin) * weight.groups, fixed + first);
  }

  // Computes blocks [begin, end) of 16 outputs, for every row of x.
  void run(int64_t begin, int64_t end) const {
    const ByteTable table = weight.table();
    for (int64_t block = begin; block < end; block++) {
      int64_t r = 0;
      for (; r + 4 <= rows; r += 4) sums<4>(block, r, table);
      switch (rows - r) {
        case 3: sums<3>(block, r, table); break;
        case 2: sums<2>(block, r, table); break;
        case 1: sums<1>(block, r, table); break;
      }
    }
  }

 private:
  template <int R>
  void sums(int64_t block, int64_t r, const ByteTable& table) const {
    const uint8_t* code = weight.code(block);
    const BFloat16* scale = weight.scale(block);
    const Fixed* row = fixed + r * weight.groups;
    F32x16 total[R] = {};
    for (int64_t g = 0; g < weight.groups; g++, row++, code += weight.bytes, scale += kLanes) {
      if (r == 0) weight.fetch(code);
      const auto of_row = [&](int i) -> const Fixed& { return row[i * weight.groups]; };
      ByteDots dots[R];
      for (int i = 0; i < R; i++) dots[i] = ByteDots(of_row(i).factors);
      for (int s = 0; s < kSteps; s++) {
        const U32x16 w = weight.step(code, s, table);
        for (int i = 0; i < R; i++) dots[i].add(w, of_row(i).factors, s);
      }
      const F32x16 s = widen(scale);
      for (int i = 0; i < R; i++)
        total[i] = fma(convert<F32x16>(dots[i].total()), s * of_row(i).scale, total[i]);
    }
    const int64_t first = block * kLanes, count = out - first;
    const F32x16 add = bias ? read_first(bias + first, count) : F32x16{};
    for (int i = 0; i < R; i++) write_first(y + (r + i) * out + first, total[i] + add, count);
  }
};

}  // namespace workhorse::packed_linear

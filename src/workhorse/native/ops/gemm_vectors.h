// Gemms of float32, or of bfloat16 summed in float32, in vectors of 64 bytes: for CPUs without a matrix unit.
//
// C = A₁ B₁ + A₂ B₂ + …; each vector of a panel of B is multiplied by every lane of a panel of A:
//
//   registers  sums of a panel of A by a panel of B
//   L1 cache   a panel of A, reused for every panel of B
//   L2 cache   a packed block of B, reused for every panel of A
//
// (the layers of 10.1145/1356052.1356053). How a number is rounded depends on the lengths of k alone: not on
// the threads, on how many rows and columns there are, or on whose CPU it is.
#pragma once

#include <algorithm>
#include <vector>

#include "ops/gemm_panels.h"
#include "ops/room.h"

namespace workhorse::gemm_vectors {

#ifdef __AVX512F__

constexpr int kHigh = 12, kWide = 32;  // lanes of a panel of A, of B
constexpr int kGroup = 4 * kHigh;      // lanes of A that are packed at once, so that lines of memory are used whole
constexpr int64_t kWhole = 768;        // words of the longest k that is not split
constexpr int64_t kCut = 256;          // words of a part otherwise
constexpr int64_t kBlock = 1 << 17;    // words of a block of B
constexpr int64_t kTotals = 1 << 18;   // partial sums kept between parts of k

inline __m512 add_product(__m512 sum, __m512i a, __m512i b, float) {
  return _mm512_fmadd_ps((__m512)a, (__m512)b, sum);
}

#ifdef __AVX512BF16__
inline __m512 add_product(__m512 sum, __m512i a, __m512i b, BFloat16) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}
#endif

using Sums = __m512[kHigh][2];  // of a panel of A by a panel of B

// Where they go: to C, or, before the last part of k, to `totals`.
template <class T>
struct Target {
  T* at;
  int64_t stride, rows, columns;
  const T* bias;  // of the first column, or null
  float* totals;  // kHigh × kWide
  bool first_part, last_part;

  void put(Sums& sums) const {
    if (!first_part)
      each([&](int i, int j) { sums[i][j] += _mm512_loadu_ps(totals + i * kWide + 16 * j); });
    if (!last_part) return each([&](int i, int j) { _mm512_storeu_ps(totals + i * kWide + 16 * j, sums[i][j]); });
    const __mmask16 there[2] = {first(columns), first(columns - 16)};
    if (bias) each([&](int i, int j) { sums[i][j] += widened(there[j], bias + 16 * j); });
    each([&](int i, int j) {
      if (i < rows) store(there[j], at + i * stride + 16 * j, sums[i][j]);
    });
  }

 private:
  template <class F>
  static void each(F f) {
#pragma GCC unroll 12
    for (int i = 0; i < kHigh; i++) {
      f(i, 0);
      f(i, 1);
    }
  }
  static __m512 widened(__mmask16 there, const float* from) { return _mm512_maskz_loadu_ps(there, from); }
  static __m512 widened(__mmask16 there, const BFloat16* from) {
    return (__m512)widen((U16x16)_mm256_maskz_loadu_epi16(there, from));
  }
  static void store(__mmask16 there, float* to, __m512 sum) { _mm512_mask_storeu_ps(to, there, sum); }
  static void store(__mmask16 there, BFloat16* to, __m512 sum) {
    _mm256_mask_storeu_epi16(to, there, (__m256i)round((F32x16)sum));
  }
};

// Words of a panel of A: packed, or where they lie in memory.
struct Packed {
  const Word* at;
  Word operator[](int row) const { return at[row]; }
  void step() { at += kGroup; }
};

struct InPlace {
  const Word* at;
  int64_t stride;  // words
  Word operator[](int row) const { return at[row * stride]; }
  void step() { at++; }
};

template <class T, class Left>
void multiply(Left a, const Word* b, int64_t depth, const Target<T>& to) {
  Sums sums = {};
  for (; depth; depth--, a.step(), b += kWide) {
    const __m512i left = _mm512_loadu_si512(b), right = _mm512_loadu_si512(b + 16);
#pragma GCC unroll 12
    for (int i = 0; i < kHigh; i++) {
      const __m512i one = _mm512_set1_epi32(a[i]);
      sums[i][0] = add_product(sums[i][0], one, left, T{});
      sums[i][1] = add_product(sums[i][1], one, right, T{});
    }
  }
  to.put(sums);
}

// Two matrices to be multiplied, A of (rows, k) and B of (k, columns).
template <class T>
struct Term {
  Operand<T> a, b;
  int64_t k;
};

// The sum of the products of some terms.
template <class T>
struct Product {
  std::vector<Term<T>> terms;
  T* c;
  int64_t stride;  // of C
  const T* bias;   // for each column, or null

  // Computes rows [m, m_end) and columns [n, n_end), on one thread.
  void run(int64_t m, int64_t m_end, int64_t n, int64_t n_end) const {
    thread_local Room room;
    const std::vector<Part> parts = cut();
    const bool whole = parts.size() == 1;
    int64_t deep = 1;
    for (const Part& one : parts) deep = std::max(deep, words<T>(one.depth));
    const int64_t wide = part(n_end - n, kBlock / deep / kWide * kWide, kWide);
    const int64_t high = whole ? m_end - m : part(m_end - m, kTotals / wide / kHigh * kHigh, kHigh);
    const int64_t left = kGroup * deep, right = wide * deep;
    const int64_t totals = whole ? 0 : round_up(high, kHigh) * wide;
    Word* const scratch = (Word*)room.of((left + right + totals) * sizeof(Word));
    for (int64_t j = n; j < n_end; j += wide)
      for (int64_t i = m; i < m_end; i += high)
        for (const Part& one : parts)
          block(i, std::min(high, m_end - i), j, std::min(wide, n_end - j), one, &one == &parts.front(),
                &one == &parts.back(), scratch, scratch + left, (float*)(scratch + left + right));
  }

 private:
  struct Part {
    const Term<T>* of;
    int64_t k, depth;
  };

  // The parts of k that are summed one after the other.
  std::vector<Part> cut() const {
    std::vector<Part> parts;
    for (const Term<T>& term : terms) {
      const bool whole = words<T>(term.k) <= kWhole;
      const int64_t deep = whole ? term.k : part(term.k, kCut * kOfWord<T>, kOfWord<T>);
      for (int64_t k = 0; k < term.k; k += deep) parts.push_back({&term, k, std::min(deep, term.k - k)});
    }
    return parts;
  }

  // Multiplies `rows` rows of A by a block of B.
  void block(int64_t i, int64_t rows, int64_t j, int64_t columns, const Part& one, bool first_part,
             bool last_part, Word* left, Word* right, float* totals) const {
    const auto& [a, b, _] = *one.of;
    const int64_t depth = words<T>(one.depth);
    for (int64_t s = 0; s < columns; s += kWide)
      b.template pack<kWide>(j + s, std::min<int64_t>(kWide, columns - s), one.k, one.depth, right + s * depth);
    for (int64_t g = 0; g < rows; g += kGroup) {
      const int64_t lanes = std::min<int64_t>(kGroup, rows - g);
      const bool in_place = a.along && lanes % kHigh == 0 && one.depth % kOfWord<T> == 0 && a.stride % kOfWord<T> == 0;
      if (!in_place) a.template pack<kGroup>(i + g, lanes, one.k, one.depth, left);
      for (int64_t r = g; r < g + lanes; r += kHigh)
        for (int64_t s = 0; s < columns; s += kWide, totals += kHigh * kWide) {
          const Target<T> to{c + (i + r) * stride + j + s, stride,     g + lanes - r,
                             columns - s,                  bias ? bias + j + s : nullptr,
                             totals,                       first_part, last_part};
          if (in_place)
            multiply(InPlace{(const Word*)(a.at + (i + r) * a.stride + one.k), a.stride / kOfWord<T>},
                     right + s * depth, depth, to);
          else
            multiply(Packed{left + (r - g)}, right + s * depth, depth, to);
        }
    }
  }
};

#endif  // __AVX512F__

}  // namespace workhorse::gemm_vectors

// Gemms of float32, or of bfloat16 summed in float32, with vectors of 32 or 64 bytes.
//
// C = A₁ B₁ + A₂ B₂ + …; each vector of a panel of B is multiplied by every lane of a panel of A:
//
//   registers  sums of a panel of A by a panel of B
//   L1 cache   a panel of A, reused for every panel of B
//   L2 cache   a packed block of B, reused for every panel of A
//
// (the layers of 10.1145/1356052.1356053). The rounding of an element depends only on the lengths of k and, in
// bfloat16, on whether it is widened. It does not depend on the threads or on the numbers of rows and columns.
#pragma once

#include <algorithm>
#include <vector>

#include "ops/gemm/panels.h"
#include "ops/scratch.h"
#include "simd/elementwise.h"

namespace workhorse::gemm_vectors {

constexpr int kVectors = kRegister == 64 ? 2 : 1;   // vectors side by side. The registers hold sums of
constexpr int kHigh = kRegister == 64 ? 12 : 6;     // kHigh lanes of a panel of A
constexpr int kWide = 16 * kVectors;                // by kWide lanes of a panel of B
constexpr int kGroup = 48;             // lanes of A that are packed at once, to use whole cache lines
constexpr int64_t kWhole = 768;        // words of the longest k that is not split
constexpr int64_t kCut = 256;          // words of a part otherwise
constexpr int64_t kBlock = 1 << 17;    // words of a block of B
constexpr int64_t kTotals = 1 << 18;   // partial sums kept between parts of k

// Adds the products of one word of A and words of B.
template <class T>
inline F32x16 add_product(F32x16 sum, Word a, U32x16 b) {
#ifdef __AVX512BF16__
  if constexpr (kOfWord<T> == 2)
    return (F32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(a), (__m512bh)b);
  else
#endif
    return fma(as<float>(a), as<F32x16>(b), sum);
}

using Sums = F32x16[kHigh][kVectors];  // sums of a panel of A by a panel of B

template <class F>
inline void each_sum(F f) {
#pragma GCC unroll 12
  for (int i = 0; i < kHigh; i++)
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; j++) f(i, j);
}

// The elements of a part of k: parts are summed one after the other.
template <class T>
inline int64_t part_of(int64_t k) {
  return words<T>(k) <= kWhole ? k : even_part(k, kCut * kOfWord<T>, kOfWord<T>);
}

// Destination of the sums: C, or `totals` before the last part of k.
template <class T>
struct Target {
  T* at;
  int64_t stride, rows, columns;
  const T* bias;  // bias of the first column, or null
  float* totals;  // kHigh × kWide
  bool first_part, last_part;

  void put(Sums& sums) const {
    if (!first_part)
      each_sum([&](int i, int j) { sums[i][j] += load<F32x16>(totals + i * kWide + 16 * j); });
    if (!last_part) return each_sum([&](int i, int j) { workhorse::put(totals + i * kWide + 16 * j, sums[i][j]); });
    if (bias)
      each_sum([&](int i, int j) {
        sums[i][j] += first_of<16, F32x16>(bias + 16 * j, columns - 16 * j, [](const T* all) { return widen(all); });
      });
    if (rows >= kHigh && columns >= kWide)
      return each_sum([&](int i, int j) { write(at + i * stride + 16 * j, sums[i][j]); });
    T kept[kHigh][kWide];
    each_sum([&](int i, int j) { write(&kept[i][16 * j], sums[i][j]); });
    for (int i = 0; i < kHigh && i < rows; i++)
      std::copy_n(kept[i], std::min<int64_t>(columns, kWide), at + i * stride);
  }
};

// Words of a panel of A: packed, or at their place in memory.
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

// Adds the products of a word of each lane of A and a word of each lane of a panel of B.
template <class T, class Left>
inline void add_products(Sums& sums, const Left& a, const Word* b) {
  U32x16 words[kVectors];
#pragma GCC unroll 2
  for (int j = 0; j < kVectors; j++) words[j] = load<U32x16>(b + 16 * j);
#pragma GCC unroll 12
  for (int i = 0; i < kHigh; i++) {
    const Word one = a[i];
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; j++) sums[i][j] = add_product<T>(sums[i][j], one, words[j]);
  }
}

template <class T, class Left>
void multiply(Left a, const Word* b, int64_t depth, const Target<T>& to) {
  Sums sums = {};
  for (; depth; depth--, a.step(), b += kWide) add_products<T>(sums, a, b);
  to.put(sums);
}

// Two matrices to multiply, A of (rows, k) and B of (k, columns).
template <class T>
struct Term {
  Operand<T> a, b;
  int64_t k;
};

// The sum of the matmuls of some terms.
template <class T>
struct Product {
  std::vector<Term<T>> terms;
  T* c;
  int64_t stride;  // of C
  const T* bias;   // for each column, or null

  // Computes rows [m, m_end) and columns [n, n_end), on one thread.
  void run(int64_t m, int64_t m_end, int64_t n, int64_t n_end) const {
    thread_local ScratchBuffer buffer;
    const std::vector<Part> parts = cut();
    const bool whole = parts.size() == 1;
    int64_t deep = 1;
    for (const Part& one : parts) deep = std::max(deep, words<T>(one.depth));
    const int64_t wide = even_part(n_end - n, kBlock / deep / kWide * kWide, kWide);
    const int64_t high = whole ? m_end - m : even_part(m_end - m, kTotals / wide / kHigh * kHigh, kHigh);
    const int64_t left = kGroup * deep, right = wide * deep;
    const int64_t totals = whole ? 0 : round_up(high, kHigh) * wide;
    Word* const scratch = (Word*)buffer.at_least((left + right + totals) * sizeof(Word));
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
      const int64_t deep = part_of<T>(term.k);
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
      const bool in_place = kAsItLies<T> && a.along && lanes % kHigh == 0 &&
                            one.depth % kOfWord<T> == 0 && a.stride % kOfWord<T> == 0;
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

}  // namespace workhorse::gemm_vectors

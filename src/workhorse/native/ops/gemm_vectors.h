// C = A B of float32 in vectors of 64 bytes, for CPUs on which PyTorch's library takes shorter ones.
//
// A panel holds, for one k after the other, the numbers of its lanes: rows of A or columns of B. Each vector
// of a panel of B is multiplied by every lane of a panel of A:
//
//   registers  sums of a panel of A by a panel of B
//   L1 cache   a panel of A, reused for every panel of B
//   L2 cache   a packed block of B, reused for every panel of A
//
// (the layers of 10.1145/1356052.1356053). How a number is rounded depends on k alone: not on the threads, on
// how many rows and columns there are, or on whose CPU it is.
#pragma once

#include <algorithm>

#include "ops/room.h"
#include "simd/transpose.h"

namespace workhorse::gemm_vectors {

#ifdef __AVX512F__

constexpr int kHigh = 12, kWide = 32;  // lanes of a panel of A, of B
constexpr int64_t kWhole = 384;        // the longest k that is not split
constexpr int64_t kCut = 256;          // the k of a part otherwise
constexpr int64_t kBlock = 1 << 17;    // numbers of a block of B
constexpr int64_t kTotals = 1 << 18;   // partial sums kept between parts of k

inline __mmask16 first(int64_t count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (1u << count) - 1; }

// One operand in memory.
struct Operand {
  const float* at;
  int64_t stride;  // numbers from one row to the next
  bool along;      // whether k runs along the rows

  // Packs `lanes` lanes from `lane` on and `depth` k from `k` on into a panel of W lanes, padded with zeros.
  template <int W>
  void pack(int64_t lane, int64_t lanes, int64_t k, int64_t depth, float* to) const {
    if (along)
      turn<W>(at + lane * stride + k, lanes, depth, to);
    else
      copy<W>(at + k * stride + lane, lanes, depth, to);
  }

 private:
  template <int W>
  void turn(const float* from, int64_t lanes, int64_t depth, float* to) const {
    for (int64_t k = 0; k < depth; k += 16)
      for (int g = 0; g < W; g += 16) {
        __m512i v[16];
        for (int i = 0; i < 16; i++) {
          const __mmask16 there = g + i < lanes ? first(depth - k) : 0;
          v[i] = _mm512_maskz_loadu_epi32(there, from + (g + i) * stride + k);
        }
        transpose(v);
        for (int i = 0; i < 16 && k + i < depth; i++)
          _mm512_mask_storeu_epi32(to + (k + i) * W + g, first(W - g), v[i]);
      }
  }

  template <int W>
  void copy(const float* from, int64_t lanes, int64_t depth, float* to) const {
    for (int64_t k = 0; k < depth; k++, from += stride, to += W)
      for (int g = 0; g < W; g += 16)
        _mm512_mask_storeu_ps(to + g, first(W - g), _mm512_maskz_loadu_ps(first(lanes - g), from + g));
  }
};

// Where the sums of two panels go: to C, or, before the last part of k, to `totals`.
struct Target {
  float* at;
  int64_t stride, rows, columns;
  const float* bias;  // of the first column, or null
  float* totals;      // kHigh × kWide
  bool first_part, last_part;

  void put(int row, int begin, __m512 sum) const {
    float* const total = totals + row * kWide + begin;
    if (!first_part) sum = _mm512_add_ps(sum, _mm512_loadu_ps(total));
    if (!last_part) return _mm512_storeu_ps(total, sum);
    if (row >= rows) return;
    const __mmask16 there = first(columns - begin);
    if (bias) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(there, bias + begin));
    _mm512_mask_storeu_ps(at + row * stride + begin, there, sum);
  }
};

inline void multiply(const float* a, const float* b, int64_t depth, const Target& to) {
  __m512 sums[kHigh][2] = {};
  for (; depth; depth--, a += kHigh, b += kWide) {
    const __m512 left = _mm512_loadu_ps(b), right = _mm512_loadu_ps(b + 16);
#pragma GCC unroll 12
    for (int i = 0; i < kHigh; i++) {
      const __m512 one = _mm512_set1_ps(a[i]);
      sums[i][0] = _mm512_fmadd_ps(one, left, sums[i][0]);
      sums[i][1] = _mm512_fmadd_ps(one, right, sums[i][1]);
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < kHigh; i++) {
    to.put(i, 0, sums[i][0]);
    to.put(i, 16, sums[i][1]);
  }
}

struct Product {
  Operand a, b;
  float* c;
  int64_t stride;     // of C
  const float* bias;  // for each column, or null
  int64_t k;

  // Computes rows [m, m_end) and columns [n, n_end), on one thread.
  void run(int64_t m, int64_t m_end, int64_t n, int64_t n_end) const {
    thread_local Room room;
    const bool whole = k <= kWhole;
    const int64_t deep = whole ? k : part(k, kCut, 1);
    const int64_t wide = part(n_end - n, kBlock / deep / kWide * kWide, kWide);
    const int64_t high = whole ? m_end - m : part(m_end - m, kTotals / wide / kHigh * kHigh, kHigh);
    const int64_t left = round_up(kHigh * deep, 16), right = wide * deep;
    const int64_t totals = whole ? 0 : round_up(high, kHigh) * wide;
    float* const scratch = (float*)room.of((left + right + totals) * sizeof(float));
    for (int64_t j = n; j < n_end; j += wide)
      for (int64_t i = m; i < m_end; i += high)
        for (int64_t l = 0; l < k; l += deep)
          block(i, std::min(high, m_end - i), j, std::min(wide, n_end - j), l, std::min(deep, k - l),
                scratch, scratch + left, scratch + left + right);
  }

 private:
  // Multiplies `rows` rows of A by a block of B.
  void block(int64_t i, int64_t rows, int64_t j, int64_t columns, int64_t l, int64_t depth, float* left,
             float* right, float* totals) const {
    for (int64_t s = 0; s < columns; s += kWide)
      b.pack<kWide>(j + s, std::min<int64_t>(kWide, columns - s), l, depth, right + s * depth);
    for (int64_t r = 0; r < rows; r += kHigh) {
      const int64_t lanes = std::min<int64_t>(kHigh, rows - r);
      a.pack<kHigh>(i + r, lanes, l, depth, left);
      for (int64_t s = 0; s < columns; s += kWide, totals += kHigh * kWide)
        multiply(left, right + s * depth, depth,
                 {c + (i + r) * stride + j + s, stride, lanes, columns - s, bias ? bias + j + s : nullptr,
                  totals, l == 0, l + depth == k});
    }
  }
};

#endif  // __AVX512F__

}  // namespace workhorse::gemm_vectors

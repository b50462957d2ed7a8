// Attention for training in bfloat16, forwards and backwards (FlashAttention-2, 2307.08691 §3.1), a head
// at a time. Squares of scores are transposed, keys as rows and queries as columns: a query's softmax
// then runs along one lane, and no square needs turning.
#pragma once

#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "exponential.h"
#include "layers.h"
#include "transpose.h"

namespace workhorse {

constexpr int64_t kLanes = kCount<F32x16>;
constexpr int64_t kBlock = 64;     // queries of a softmax, or keys of a step backwards
constexpr int64_t kQueries = 512;  // of a step backwards; both squares stay in the second cache

// Two rows interleaved, as the right side of a matrix instruction wants them.
using Pair = uint32_t;

constexpr int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// Words (rows, columns) to (columns, rows).
inline void turn(int64_t rows, int64_t columns, const void* from, int64_t from_stride, void* to,
                 int64_t to_stride) {
  const auto source = [=](int64_t i, int64_t j) { return (const Pair*)from + i * from_stride + j; };
  const auto target = [=](int64_t i, int64_t j) { return (Pair*)to + j * to_stride + i; };
  for (int64_t i = 0; i < rows; i += kLanes)
    for (int64_t j = 0; j < columns; j += kLanes) {
#ifdef __AVX512F__
      if (i + kLanes <= rows && j + kLanes <= columns) {
        __m512i block[kLanes];
        for (int64_t r = 0; r < kLanes; r++) block[r] = _mm512_loadu_si512(source(i + r, j));
        transpose(block);
        for (int64_t r = 0; r < kLanes; r++) _mm512_storeu_si512(target(i, j + r), block[r]);
        continue;
      }
#endif
      for (int64_t r = i; r < std::min(i + kLanes, rows); r++)
        for (int64_t c = j; c < std::min(j + kLanes, columns); c++)
          std::memcpy(target(r, c), source(r, c), sizeof(Pair));
    }
}

// One head's matrix (seq, width) in the memory of a larger tensor. Elements of a row lie side by side.
struct Head {
  BFloat16* at;
  int64_t stride;

  BFloat16* row(int64_t i) const { return at + i * stride; }

  // Pairs (seq / 2, width).
  void interleave(int64_t seq, int64_t width, Pair* to) const {
    for (int64_t i = 0; i < seq; i += 2, to += width)
      for (int64_t j = 0; j < width; j++) to[j] = row(i)[j].bits | Pair(row(i + 1)[j].bits) << 16;
  }

  // The transpose's pairs (width / 2, seq).
  void turn_pairs(int64_t seq, int64_t width, Pair* to) const {
    turn(seq, width / 2, at, stride / 2, to, seq);
  }

  // The transpose (width, seq); `pairs` is room for its pairs.
  void transpose(int64_t seq, int64_t width, Pair* pairs, BFloat16* to) const {
    turn_pairs(seq, width, pairs);
    for (int64_t i = 0; i < width; i += 2, pairs += seq, to += 2 * seq)
      for (int64_t j = 0; j < seq; j++) {
        to[j].bits = uint16_t(pairs[j]);
        to[seq + j].bits = uint16_t(pairs[j] >> 16);
      }
  }

  // Rows from the columns of a float matrix (width, n), through room for (n, width).
  void write_columns(int64_t n, int64_t width, const float* from, int64_t from_stride,
                     float* turned) const {
    turn(width, n, from, from_stride, turned, width);
    for (int64_t i = 0; i < n; i++)
      each(width, [&]<class V>(V, int64_t j) { write(row(i) + j, read<V>(turned + i * width + j)); });
  }
};

// c (rows, columns) = or, More, += a (rows, depth) · b as pairs (depth / 2, columns).
inline void multiply(int64_t rows, int64_t columns, int64_t depth, const BFloat16* a,
                     int64_t a_stride, const Pair* b, int64_t b_stride, float* c, int64_t c_stride,
                     bool more = false) {
  at::native::cpublas::brgemm(rows, columns, depth, a_stride, b_stride, c_stride, more,
                              (const at::BFloat16*)a, (const at::BFloat16*)b, c);
}

// Two vectors in bfloat16, interleaved.
inline U32x16 interleaved(F32x16 low, F32x16 high) {
  BFloat16 rows[2][kLanes];
  write(rows[0], low);
  write(rows[1], high);
  return __builtin_convertvector(load<U16x16>(rows[0]), U32x16) |
         __builtin_convertvector(load<U16x16>(rows[1]), U32x16) << 16;
}

// With the lanes changed that stand for queries before a key, the first lane for number `query`.
inline F32x16 hide(F32x16 score, int64_t key, int64_t query, float with) {
  typedef int32_t I32x16 __attribute__((vector_size(64)));
  constexpr I32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return lanes < int32_t(std::min(key - query, kLanes)) ? F32x16{} + with : score;
}

// What a thread needs, made once for all its heads.
struct Scratch {
  std::vector<Pair> q, q_t, dy, dy_t, pairs;
  std::vector<BFloat16> turned, weights, slopes;
  std::vector<float> lse, delta, scores, gradients, out, dk, dv, wide;

  static Scratch forward(int64_t seq, int64_t width) {
    Scratch s;
    s.q_t.resize(seq * width / 2);
    s.turned.resize(seq * width);
    s.scores.resize(seq * kBlock);
    s.pairs.resize(std::max(seq * kBlock, seq * width) / 2);
    s.out.resize(width * kBlock);
    s.wide.resize(width * kBlock);
    s.lse.resize(kBlock);
    s.delta.resize(kBlock);
    return s;
  }

  static Scratch backward(int64_t seq, int64_t width) {
    Scratch s;
    const int64_t square = kBlock * padded(std::min(kQueries, seq));
    for (auto* pairs : {&s.q, &s.q_t, &s.dy, &s.dy_t}) pairs->resize(seq * width / 2);
    for (auto* numbers : {&s.weights, &s.slopes}) numbers->resize(square);
    for (auto* numbers : {&s.scores, &s.gradients}) numbers->resize(square);
    for (auto* numbers : {&s.dk, &s.dv}) numbers->resize(kBlock * width);
    for (auto* numbers : {&s.lse, &s.delta}) numbers->resize(padded(seq));
    for (auto* numbers : {&s.out, &s.wide}) numbers->resize(seq * width);
    s.turned.resize(seq * width);
    s.pairs.resize(std::max(square, seq * width) / 2);
    return s;
  }
};

// One head: y, and the logarithm of each query's sum of exponentials. Transposed,
//   Yᵀ = Vᵀ softmax(K Qᵀ · scale)
inline void attend(const Head& q, const Head& k, const Head& v, int64_t seq, int64_t width,
                   float scale, bool causal, Scratch& s, const Head& y, float* lse) {
  q.turn_pairs(seq, width, s.q_t.data());
  v.transpose(seq, width, s.pairs.data(), s.turned.data());
  for (int64_t first = 0; first < seq; first += kBlock) {
    const int64_t n = std::min(kBlock, seq - first);
    const int64_t keys = causal ? first + n : seq;
    multiply(keys, n, width, k.at, k.stride, s.q_t.data() + first, seq, s.scores.data(), kBlock);
    for (int64_t j = 0; j < n; j += kLanes) {
      const auto score = [&](int64_t key) {
        const F32x16 found = read<F32x16>(s.scores.data() + key * kBlock + j) * scale;
        const bool ahead = causal && key > first + j;
        return ahead ? hide(found, key, first + j, -std::numeric_limits<float>::infinity()) : found;
      };
      F32x16 peak = score(0), total{};
      for (int64_t key = 1; key < keys; key++) {
        const F32x16 other = score(key);
        peak = other > peak ? other : peak;
      }
      for (int64_t key = 0; key < keys; key += 2) {
        const F32x16 low = exponential(score(key) - peak), high = exponential(score(key + 1) - peak);
        total += low + high;
        const U32x16 both = interleaved(low, high);
        std::memcpy(s.pairs.data() + key / 2 * kBlock + j, &both, sizeof both);
      }
      write(s.lse.data() + j, peak);
      write(s.delta.data() + j, total);
    }
    multiply(width, n, keys, s.turned.data(), seq, s.pairs.data(), kBlock, s.out.data(), kBlock);
    for (int64_t i = 0; i < width; i++)
      for (int64_t j = 0; j < n; j++) s.out[i * kBlock + j] /= s.delta[j];
    for (int64_t j = 0; j < n; j++) lse[first + j] = s.lse[j] + std::log(s.delta[j]);
    Head{y.row(first), y.stride}.write_columns(n, width, s.out.data(), kBlock, s.wide.data());
  }
}

// One head backwards:
//   Pᵀ = exp(K Qᵀ · scale - lse),  dPᵀ = V dYᵀ,  Sᵀ = Pᵀ (dPᵀ - Σ y dy) · scale
//   dV = Pᵀ dY,  dK = Sᵀ Q,  dQᵀ = Kᵀ Sᵀ
inline void attend_backward(const Head& q, const Head& k, const Head& v, const Head& y,
                            const Head& dy, const float* lse, int64_t seq, int64_t width,
                            float scale, bool causal, Scratch& s, const Head& dq, const Head& dk,
                            const Head& dv) {
  q.interleave(seq, width, s.q.data());
  q.turn_pairs(seq, width, s.q_t.data());
  dy.interleave(seq, width, s.dy.data());
  dy.turn_pairs(seq, width, s.dy_t.data());
  k.transpose(seq, width, s.pairs.data(), s.turned.data());
  std::copy(lse, lse + seq, s.lse.begin());
  for (int64_t i = 0; i < seq; i++) {
    Sum product;
    each(width, [&]<class V>(V, int64_t j) { product += read<V>(y.row(i) + j) * read<V>(dy.row(i) + j); });
    s.delta[i] = product;
  }
  std::fill(s.out.begin(), s.out.end(), 0.0f);
  for (int64_t key = 0; key < seq; key += kBlock) {
    const int64_t keys = std::min(kBlock, seq - key);
    bool more = false;
    for (int64_t first = causal ? key : 0; first < seq; first += kQueries, more = true) {
      const int64_t n = std::min(kQueries, seq - first), stride = padded(n);
      multiply(keys, n, width, k.row(key), k.stride, s.q_t.data() + first, seq, s.scores.data(), stride);
      multiply(keys, n, width, v.row(key), v.stride, s.dy_t.data() + first, seq, s.gradients.data(),
               stride);
      for (int64_t i = 0; i < keys; i += 2)
        for (int64_t j = 0; j < n; j += kLanes) {
          F32x16 slopes[2];
          for (int64_t r = 0; r < 2; r++) {
            const int64_t at = (i + r) * stride + j, of = key + i + r, query = first + j;
            const F32x16 exponent =
                read<F32x16>(s.scores.data() + at) * scale - read<F32x16>(s.lse.data() + query);
            F32x16 weight = exponential(exponent < 0.0f ? exponent : F32x16{});
            if (causal && of > query) weight = hide(weight, of, query, 0);
            slopes[r] = weight * scale *
                        (read<F32x16>(s.gradients.data() + at) - read<F32x16>(s.delta.data() + query));
            write(s.weights.data() + at, weight);
            write(s.slopes.data() + at, slopes[r]);
          }
          const U32x16 both = interleaved(slopes[0], slopes[1]);
          std::memcpy(s.pairs.data() + i / 2 * stride + j, &both, sizeof both);
        }
      multiply(keys, width, n, s.weights.data(), stride, s.dy.data() + first / 2 * width, width,
               s.dv.data(), width, more);
      multiply(keys, width, n, s.slopes.data(), stride, s.q.data() + first / 2 * width, width,
               s.dk.data(), width, more);
      multiply(width, n, keys, s.turned.data() + key, seq, s.pairs.data(), stride,
               s.out.data() + first, seq, true);
    }
    for (int64_t i = 0; i < keys; i++)
      each(width, [&]<class V>(V, int64_t j) {
        write(dk.row(key + i) + j, read<V>(s.dk.data() + i * width + j));
        write(dv.row(key + i) + j, read<V>(s.dv.data() + i * width + j));
      });
  }
  dq.write_columns(seq, width, s.out.data(), seq, s.wide.data());
}

}  // namespace workhorse

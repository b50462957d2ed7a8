// Attention computed in float32, also for bfloat16 if the CPU cannot multiply it in pairs. Causal attention skips tiles
// of 16 keys by 16 queries in which no query sees a key.
#pragma once

#include <cmath>
#include <type_traits>
#include <vector>

#include "ops/training/attention.h"

namespace workhorse::attention {

// A tile of sums, as large as the registers allow: its rows, and vectors of columns.
constexpr int kHigh = kRegister == 64 ? 8 : kRegister == 32 ? 6 : 2;
constexpr int kVectors = kRegister == 64 ? 2 : 1;

// A matrix with contiguous rows (Along) or columns.
template <bool Along>
struct Left {
  const float* at;
  int64_t stride;

  const float* row(int64_t i) const { return Along ? at + i * stride : at + i; }
  float operator()(int64_t i, int64_t k) const { return Along ? at[i * stride + k] : at[k * stride + i]; }
};

template <int Rows, int Vectors, bool Along>
inline void multiply_tile(int64_t depth, Left<Along> a, const float* b, int64_t b_stride, float* c,
                          int64_t c_stride, bool more) {
  F32x16 sums[Rows][Vectors];
#pragma GCC unroll 8
  for (int i = 0; i < Rows; i++)
#pragma GCC unroll 2
    for (int j = 0; j < Vectors; j++) sums[i][j] = more ? load<F32x16>(c + i * c_stride + 16 * j) : F32x16{};
  for (int64_t k = 0; k < depth; k++, b += b_stride) {
    F32x16 right[Vectors];
#pragma GCC unroll 2
    for (int j = 0; j < Vectors; j++) right[j] = load<F32x16>(b + 16 * j);
#pragma GCC unroll 8
    for (int i = 0; i < Rows; i++)
#pragma GCC unroll 2
      for (int j = 0; j < Vectors; j++) sums[i][j] = fma(a(i, k), right[j], sums[i][j]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < Rows; i++)
#pragma GCC unroll 2
    for (int j = 0; j < Vectors; j++) put(c + i * c_stride + 16 * j, sums[i][j]);
}

// c (rows, columns) = a (rows, depth) · b, or c += a · b if `more`; columns are whole vectors.
template <bool Along>
void multiply(int64_t rows, int64_t columns, int64_t depth, Left<Along> a, const float* b, int64_t b_stride, float* c,
              int64_t c_stride, bool more = false) {
  const auto strip = [&]<int Rows>(std::integral_constant<int, Rows>, int64_t i) {
    const Left<Along> some{a.row(i), a.stride};
    int64_t j = 0;
    for (; j + 16 * kVectors <= columns; j += 16 * kVectors)
      multiply_tile<Rows, kVectors>(depth, some, b + j, b_stride, c + i * c_stride + j, c_stride, more);
    for (; j < columns; j += 16)
      multiply_tile<Rows, 1>(depth, some, b + j, b_stride, c + i * c_stride + j, c_stride, more);
  };
  int64_t i = 0;
  for (; i + kHigh <= rows; i += kHigh) strip(std::integral_constant<int, kHigh>(), i);
  if constexpr (kHigh > 4)
    for (; i + 4 <= rows; i += 4) strip(std::integral_constant<int, 4>(), i);
  for (; i < rows; i++) strip(std::integral_constant<int, 1>(), i);
}

// A thread's copies of heads and tiles, allocated once for all its heads. Rows are padded with zeros to whole vectors.
class Float32 {
 public:
  Float32(int64_t seq, int64_t width) : seq_(seq), width_(width), wide_(padded(width)) {}

  // y, and the log-sum-exp of each query.
  template <class T>
  void forward(Head<T> q, Head<T> k, Head<T> v, Scoring how, Head<T> y, float* lse) {
    const float *keys = copied(k, k_), *values = copied(v, v_), *q_t = transposed(copied(q, q_), q_t_);
    float* const scores = room(scores_, seq_ * kBlock);
    float* const out = room(out_, kBlock * wide_);
    Softmax found[kBlock / kLanes];
    for (int64_t first = 0; first < seq_; first += kBlock) {
      const int64_t n = std::min(kBlock, seq_ - first), all = how.causal ? first + n : seq_;
      for (int64_t key = 0; key < all; key += kLanes) {
        const int64_t from = how.causal ? std::max<int64_t>(0, key - first) : 0;
        multiply(std::min(kLanes, all - key), padded(n) - from, width_, Left<true>{keys + key * wide_, wide_},
                 q_t + first * wide_ + from, kBlock, scores + key * kBlock + from, kBlock);
      }
      // All 16 queries from j on see no later keys.
      const auto seen = [&](int64_t j) { return how.causal ? std::min(all, first + j + kLanes) : all; };
      for (int64_t j = 0; j < n; j += kLanes)
        found[j / kLanes] = softmax({scores + j, first + j, how}, seen(j), scores + j);
      for (int64_t key = 0; key < all; key += kBlock)
        for (int64_t j = 0; j < n; j += kLanes)
          multiply(std::min(kLanes, n - j), wide_, std::min(kBlock, seen(j) - key),
                   Left<false>{scores + key * kBlock + j, kBlock}, values + key * wide_, wide_, out + j * wide_, wide_,
                   key > 0);
      for (int64_t j = 0; j < n; j++) {
        const auto& [peak, total] = found[j / kLanes];
        const float sum = total[j % kLanes], inverse = 1 / sum;
        lse[first + j] = peak[j % kLanes] + std::log(sum);
        each(width_, [&]<class V>(V, int64_t c) {
          write(y.row(first + j) + c, read<V>(out + j * wide_ + c) * inverse);
        });
      }
    }
  }

  //   Pᵀ = exp(K Qᵀ · scale + bias - lse),  dPᵀ = V dYᵀ,  Sᵀ = Pᵀ (dPᵀ - Σ y dy) · scale
  //   dV = Pᵀ dY,  dK = Sᵀ Q,  dQ = S K
  template <class T>
  void backward(Head<T> q, Head<T> k, Head<T> v, Head<T> y, Head<T> dy, const float* lse, Scoring how, Head<T> dq,
                Head<T> dk, Head<T> dv) {
    const float *queries = copied(q, q_), *keys = copied(k, k_), *values = copied(v, v_), *above = copied(dy, dy_);
    const float *q_t = transposed(queries, q_t_), *dy_t = transposed(above, dy_t_);
    float *const weights = room(scores_, kBlock * kBlock), *const slopes = room(slopes_, kBlock * kBlock);
    float *const of_queries = zeros(out_, seq_ * wide_), *const of_keys = room(dk_, kBlock * wide_);
    float *const of_values = room(dv_, kBlock * wide_);
    float *const normalisers = zeros(lse_, padded(seq_)), *const deltas = zeros(deltas_, padded(seq_));
    std::copy(lse, lse + seq_, normalisers);
    put_deltas(y, dy, seq_, width_, deltas);
    for (int64_t key = 0; key < seq_; key += kBlock) {
      const int64_t n_keys = std::min(kBlock, seq_ - key);
      bool more = false;
      for (int64_t first = how.causal ? key : 0; first < seq_; first += kBlock, more = true) {
        const int64_t n = std::min(kBlock, seq_ - first);
        for (int64_t i = 0; i < n_keys; i += kLanes) {
          const int64_t from = how.causal ? std::max<int64_t>(0, key + i - first) : 0;
          const int64_t rows = std::min(kLanes, n_keys - i);
          const int64_t at = i * kBlock + from, query = first + from, within = first * wide_ + from;
          multiply(rows, padded(n) - from, width_, Left<true>{keys + (key + i) * wide_, wide_}, q_t + within,
                   kBlock, weights + at, kBlock);
          multiply(rows, padded(n) - from, width_, Left<true>{values + (key + i) * wide_, wide_}, dy_t + within,
                   kBlock, slopes + at, kBlock);
          for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < n - from; j += kLanes) {
              float *const weight_at = weights + at + r * kBlock + j, *const slope_at = slopes + at + r * kBlock + j;
              const F32x16 weight = weight_again(load<F32x16>(weight_at), load<F32x16>(normalisers + query + j), how,
                                                 key + i + r, query + j);
              put(weight_at, weight);
              put(slope_at, weight * how.scale * (load<F32x16>(slope_at) - load<F32x16>(deltas + query + j)));
            }
          multiply(rows, wide_, n - from, Left<true>{weights + at, kBlock}, above + query * wide_, wide_,
                   of_values + i * wide_, wide_, more);
          multiply(rows, wide_, n - from, Left<true>{slopes + at, kBlock}, queries + query * wide_, wide_,
                   of_keys + i * wide_, wide_, more);
        }
        for (int64_t j = 0; j < n; j += kLanes)
          multiply(std::min(kLanes, n - j), wide_, how.causal ? std::min(n_keys, first + j + kLanes - key) : n_keys,
                   Left<false>{slopes + j, kBlock}, keys + key * wide_, wide_, of_queries + (first + j) * wide_, wide_,
                   true);
      }
      write_rows(of_keys, n_keys, Head<T>{dk.row(key), dk.stride});
      write_rows(of_values, n_keys, Head<T>{dv.row(key), dv.stride});
    }
    write_rows(of_queries, seq_, dq);
  }

 private:
  using Room = std::vector<float>;

  struct Softmax {
    F32x16 peak, total;
  };

  // Replaces the scores of the first `keys` by e^(score - peak).
  static Softmax softmax(Scores score, int64_t keys, float* weights) {
    const F32x16 peak = score.peak(keys);
    F32x16 total{};
    for (int64_t key = 0; key < keys; key++) {
      const F32x16 weight = exponential(score(key) - peak);
      total += weight;
      put(weights + key * kBlock, weight);
    }
    return {peak, total};
  }

  static float* zeros(Room& of, int64_t numbers) {
    of.assign(numbers, 0.0f);
    return of.data();
  }

  // (seq, padded width).
  template <class T>
  const float* copied(Head<T> head, Room& of) const {
    float* const to = room(of, seq_ * wide_);
    for (int64_t i = 0; i < seq_; i++)
      each(width_, [&]<class V>(V, int64_t j) { write(to + i * wide_ + j, read<V>(head.row(i) + j)); });
    return to;
  }

  // The copy, transposed in blocks of (padded width, kBlock): as one matrix, all its lines could share a few
  // sets of the cache.
  const float* transposed(const float* copy, Room& of) const {
    float* const to = room(of, wide_ * round_up(seq_, kBlock));
    for (int64_t i = 0; i < seq_; i += kBlock)
      transpose_words(std::min(kBlock, seq_ - i), wide_, copy + i * wide_, wide_, to + i * wide_, kBlock);
    return to;
  }

  template <class T>
  void write_rows(const float* from, int64_t rows, Head<T> to) const {
    for (int64_t i = 0; i < rows; i++)
      each(width_, [&]<class V>(V, int64_t j) { write(to.row(i) + j, read<V>(from + i * wide_ + j)); });
  }

  int64_t seq_, width_, wide_;
  Room q_, k_, v_, dy_, q_t_, dy_t_, scores_, slopes_, out_, dk_, dv_, lse_, deltas_;
};

}  // namespace workhorse::attention

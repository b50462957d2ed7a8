// Attention for training, one head at a time: code shared by `attention_float32.h` and `attention_pairs.h`. The forward
// pass multiplies 64 queries by all keys, with an ordinary softmax. The backward pass computes the weights again from
// the normaliser of each query (FlashAttention-2, 2307.08691 §3.1). Tiles of scores hold keys as rows and queries as
// columns, so the softmax of a query stays in one lane and no tile of scores has to be transposed.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "ops/scratch.h"
#include "simd/elementwise.h"
#include "simd/exponential.h"
#include "simd/transpose.h"

namespace workhorse::attention {

constexpr int64_t kLanes = kCount<F32x16>;
constexpr int64_t kBlock = 64;  // queries of a forward tile; keys of a backward tile, and in float32 its queries

inline int64_t padded(int64_t n) { return round_up(n, kLanes); }

// A thread's scratch memory, with space for at least the given number of elements.
template <class T>
T* room(std::vector<T>& of, int64_t numbers) {
  if (int64_t(of.size()) < numbers) of.resize(numbers);
  return of.data();
}

// One head's matrix (seq, width) within a larger tensor. Its rows are contiguous.
template <class T>
struct Head {
  T* at;
  int64_t stride;

  T* row(int64_t i) const { return at + i * stride; }
};

// Σ y dy of each query; the softmax gradient subtracts it from the gradient of each weight.
template <class T>
void put_deltas(Head<T> y, Head<T> dy, int64_t seq, int64_t width, float* to) {
  for (int64_t i = 0; i < seq; i++) {
    Sum product;
    each(width, [&]<class V>(V, int64_t j) { product.add_product(read<V>(y.row(i) + j), read<V>(dy.row(i) + j)); });
    to[i] = product;
  }
}

// Transposes words (rows, columns) to (columns, rows).
inline void transpose_words(int64_t rows, int64_t columns, const void* from, int64_t from_stride, void* to,
                            int64_t to_stride) {
  using Word = uint32_t;
  const auto source = [=](int64_t i, int64_t j) { return (const Word*)from + i * from_stride + j; };
  const auto target = [=](int64_t i, int64_t j) { return (Word*)to + j * to_stride + i; };
  for (int64_t i = 0; i < rows; i += kLanes)
    for (int64_t j = 0; j < columns; j += kLanes) {
      if (i + kLanes <= rows && j + kLanes <= columns) {
        U32x16 block[kLanes];
        for (int64_t r = 0; r < kLanes; r++) block[r] = load<U32x16>(source(i + r, j));
        transpose(block);
        for (int64_t r = 0; r < kLanes; r++) put(target(i, j + r), block[r]);
        continue;
      }
      for (int64_t r = i; r < std::min(i + kLanes, rows); r++)
        for (int64_t c = j; c < std::min(j + kLanes, columns); c++)
          std::memcpy(target(r, c), source(r, c), sizeof(Word));
    }
}

// The scores of a key, replaced by `instead` for queries before it. Lane 0 is the query of index `query`.
inline F32x16 hide(F32x16 score, int64_t key, int64_t query, float instead) {
  return select(lane_numbers() < int32_t(std::min(key - query, kLanes)), F32x16{} + instead, score);
}

// How scores follow from dot products of queries and keys.
struct Scoring {
  float scale;
  bool causal;
  float slope;  // of ALiBi's bias (2108.12409), -slope · distance; 0 for none

  // The scores of a key for 16 queries from index `query` on, with the bias.
  F32x16 biased(F32x16 score, int64_t key, int64_t query) const {
    if (slope == 0.0f) return score;
    return fma(convert<F32x16>(lane_numbers() + int32_t(query - key)), -slope, score);
  }
};

// Scores of a column of 16 queries, from index `query` on.
struct Scores {
  const float* at;  // scores of key 0; the scores of the next key follow after kBlock elements
  int64_t query;
  Scoring how;

  F32x16 operator()(int64_t key) const {
    const F32x16 found = how.biased(load<F32x16>(at + key * kBlock) * how.scale, key, query);
    return how.causal && key > query ? hide(found, key, query, -std::numeric_limits<float>::infinity()) : found;
  }

  // The largest of the first `keys` scores.
  F32x16 peak(int64_t keys) const {
    F32x16 largest = (*this)(0);
    for (int64_t key = 1; key < keys; key++) {
      const F32x16 other = (*this)(key);
      largest = select(other > largest, other, largest);
    }
    return largest;
  }
};

// The weight of a key for 16 queries from index `query` on, from their scores and log-sum-exp.
inline F32x16 weight_again(F32x16 score, F32x16 lse, Scoring how, int64_t key, int64_t query) {
  const F32x16 exponent = how.biased(fma(score, how.scale, -lse), key, query);
  const F32x16 weight = exponential(select(exponent > 0.0f, F32x16{}, exponent));
  return how.causal && key > query ? hide(weight, key, query, 0) : weight;
}

}  // namespace workhorse::attention

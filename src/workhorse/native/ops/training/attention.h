// Attention for training, one head at a time, multiplied as T = BFloat16 or float. The forward pass takes 64 queries
// by all keys, with an ordinary softmax; the backward pass computes the weights again from the normaliser of each
// query (FlashAttention-2, 2307.08691 §3.1). Tiles of scores hold keys as rows and queries as columns, so that the
// softmax of a query stays in one lane and no tile of scores has to be transposed.
#pragma once

#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "ops/scratch.h"
#include "simd/elementwise.h"
#include "simd/exponential.h"
#include "simd/transpose.h"

namespace workhorse::attention {

constexpr int64_t kLanes = kCount<F32x16>;
constexpr int64_t kBlock = 64;     // queries of a forward tile, or keys of a backward tile

// The element of a packed right operand: two rows of bfloat16 interleaved, or one row of float.
using Word = uint32_t;

template <class T>
constexpr int64_t kRowsOfWord = sizeof(Word) / sizeof(T);

// Queries of a backward tile: the tiles of a step together stay within 512 KiB of the L2 cache.
template <class T>
constexpr int64_t kQueries = kRowsOfWord<T> == 1 ? 256 : 512;

inline int64_t padded(int64_t n) { return round_up(n, kLanes); }

// Transposes words (rows, columns) to (columns, rows).
inline void transpose_words(int64_t rows, int64_t columns, const void* from, int64_t from_stride, void* to,
                            int64_t to_stride) {
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

// One head's matrix (seq, width) within a larger tensor. Its rows are contiguous.
template <class T>
struct Head {
  T* at;
  int64_t stride;

  T* row(int64_t i) const { return at + i * stride; }

  // Packs the matrix into words (seq / kRowsOfWord, width).
  void interleave(int64_t seq, int64_t width, Word* to) const {
    for (int64_t i = 0; i < seq; i += kRowsOfWord<T>, to += width)
      if constexpr (kRowsOfWord<T> == 1)
        std::memcpy(to, row(i), width * sizeof(Word));
      else
        for (int64_t j = 0; j < width; j++) to[j] = row(i)[j].bits | Word(row(i + 1)[j].bits) << 16;
  }

  // Packs the transpose into words (width / kRowsOfWord, seq).
  void pack_transpose(int64_t seq, int64_t width, Word* to) const {
    transpose_words(seq, width / kRowsOfWord<T>, at, stride / kRowsOfWord<T>, to, seq);
  }

  // Writes the transpose (width, seq); `words` is scratch for its words.
  void transpose(int64_t seq, int64_t width, Word* words, T* to) const {
    if constexpr (kRowsOfWord<T> == 1) return pack_transpose(seq, width, (Word*)to);
    else {
      pack_transpose(seq, width, words);
      for (int64_t i = 0; i < width; i += 2, words += seq, to += 2 * seq)
        for (int64_t j = 0; j < seq; j++) {
          to[j].bits = uint16_t(words[j]);
          to[seq + j].bits = uint16_t(words[j] >> 16);
        }
    }
  }

  // Fills n rows from the columns of a float matrix (width, n); `transposed` is scratch for (n, width).
  void write_columns(int64_t n, int64_t width, const float* from, int64_t from_stride,
                     float* transposed) const {
    transpose_words(width, n, from, from_stride, transposed, width);
    for (int64_t i = 0; i < n; i++)
      each(width, [&]<class V>(V, int64_t j) { write(row(i) + j, read<V>(transposed + i * width + j)); });
  }
};

// c (rows, columns) = a (rows, depth) · b, or c += a · b if `more`. b holds words (depth / kRowsOfWord,
// columns).
template <class T>
void multiply(int64_t rows, int64_t columns, int64_t depth, const T* a, int64_t a_stride, const Word* b,
              int64_t b_stride, float* c, int64_t c_stride, bool more = false) {
  using Number = std::conditional_t<kRowsOfWord<T> == 1, float, at::BFloat16>;
  at::native::cpublas::brgemm(rows, columns, depth, a_stride, b_stride, c_stride, more,
                              (const Number*)a, (const Number*)b, c);
}

// A vector of each of the rows that share a word.
template <class T>
using Parts = std::array<F32x16, kRowsOfWord<T>>;

inline void write_words(Word* to, const Parts<float>& rows) { put(to, rows[0]); }

inline void write_words(Word* to, const Parts<BFloat16>& rows) {
  put(to, convert<U32x16>(round(rows[0])) | convert<U32x16>(round(rows[1])) << 16);
}

// The scores of a key, replaced by `instead` for queries before it. Lane 0 is query number `query`.
inline F32x16 hide(F32x16 score, int64_t key, int64_t query, float instead) {
  return select(lane_numbers() < int32_t(std::min(key - query, kLanes)), F32x16{} + instead, score);
}

// As what numbers of T are multiplied.
template <class T>
using Factor = std::conditional_t<kPairs, T, float>;

// A thread's scratch memory, allocated once for all its heads.
template <class T>
struct Scratch {
  std::vector<Word> q, q_t, dy, dy_t, words;
  std::vector<T> transposed, weights, slopes;
  std::vector<float> lse, delta, scores, gradients, out, dk, dv, wide;
  std::vector<T> wide_q, wide_k, wide_v, wide_dy;

  static Scratch forward(int64_t seq, int64_t width) {
    Scratch s;
    s.q_t.resize(seq * width / kRowsOfWord<T>);
    s.transposed.resize(seq * width);
    s.scores.resize(seq * kBlock);
    s.words.resize(std::max(seq * kBlock, seq * width) / kRowsOfWord<T>);
    s.out.resize(width * kBlock);
    s.wide.resize(width * kBlock);
    return s;
  }

  static Scratch backward(int64_t seq, int64_t width) {
    Scratch s;
    const int64_t square = kBlock * padded(std::min(kQueries<T>, seq));
    for (auto* words : {&s.q, &s.q_t, &s.dy, &s.dy_t}) words->resize(seq * width / kRowsOfWord<T>);
    for (auto* numbers : {&s.weights, &s.slopes}) numbers->resize(square);
    for (auto* numbers : {&s.scores, &s.gradients}) numbers->resize(square);
    for (auto* numbers : {&s.dk, &s.dv}) numbers->resize(kBlock * width);
    for (auto* numbers : {&s.lse, &s.delta}) numbers->resize(padded(seq));
    for (auto* numbers : {&s.out, &s.wide}) numbers->resize(seq * width);
    s.transposed.resize(seq * width);
    s.words.resize(std::max(square, seq * width) / kRowsOfWord<T>);
    return s;
  }
};

// A head as it is multiplied: itself, or widened into `room`.
template <class T>
Head<Factor<T>> as_factor(Head<T> head, int64_t seq, int64_t width, std::vector<Factor<T>>& room) {
  if constexpr (std::is_same_v<Factor<T>, T>) {
    return head;
  } else {
    room.resize(seq * width);
    const Head<float> wide{room.data(), width};
    for (int64_t i = 0; i < seq; i++)
      each(width, [&]<class V>(V, int64_t j) { write(wide.row(i) + j, read<V>(head.row(i) + j)); });
    return wide;
  }
}

// One head forward: y, and the log-sum-exp of each query. Transposed,
//   Yᵀ = Vᵀ softmax(K Qᵀ · scale)
template <class Number, class T = Factor<Number>>
void forward(Head<Number> given_q, Head<Number> given_k, Head<Number> given_v, int64_t seq, int64_t width,
             float scale, bool causal, Scratch<T>& s, Head<Number> y, float* lse) {
  const Head<T> q = as_factor(given_q, seq, width, s.wide_q), k = as_factor(given_k, seq, width, s.wide_k),
                v = as_factor(given_v, seq, width, s.wide_v);
  float peaks[kBlock], inverses[kBlock];  // of each query: its largest score, and 1 / Σ exp(score - peak)
  q.pack_transpose(seq, width, s.q_t.data());
  v.transpose(seq, width, s.words.data(), s.transposed.data());
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
      // Keys from here on are ahead of all these queries.
      const int64_t seen = causal ? std::min(keys, first + j + kLanes) : keys;
      F32x16 peak = score(0), total{};
      for (int64_t key = 1; key < seen; key++) {
        const F32x16 other = score(key);
        peak = select(other > peak, other, peak);
      }
      for (int64_t key = 0; key < keys; key += kRowsOfWord<T>) {
        Parts<T> weights{};
        F32x16 together{};
        for (int64_t r = 0; key < seen && r < kRowsOfWord<T>; r++)
          together += weights[r] = exponential(score(key + r) - peak);
        total += together;
        write_words(s.words.data() + key / kRowsOfWord<T> * kBlock + j, weights);
      }
      write(peaks + j, peak);
      write(inverses + j, 1.0f / total);
    }
    multiply(width, n, keys, s.transposed.data(), seq, s.words.data(), kBlock, s.out.data(), kBlock);
    for (int64_t i = 0; i < width; i++)
      for (int64_t j = 0; j < n; j++) s.out[i * kBlock + j] *= inverses[j];
    for (int64_t j = 0; j < n; j++) lse[first + j] = peaks[j] - std::log(inverses[j]);
    Head<Number>{y.row(first), y.stride}.write_columns(n, width, s.out.data(), kBlock, s.wide.data());
  }
}

// One head backward:
//   Pᵀ = exp(K Qᵀ · scale - lse),  dPᵀ = V dYᵀ,  Sᵀ = Pᵀ (dPᵀ - Σ y dy) · scale
//   dV = Pᵀ dY,  dK = Sᵀ Q,  dQᵀ = Kᵀ Sᵀ
template <class Number, class T = Factor<Number>>
void backward(Head<Number> given_q, Head<Number> given_k, Head<Number> given_v, Head<Number> y, Head<Number> given_dy,
              const float* lse, int64_t seq, int64_t width, float scale, bool causal, Scratch<T>& s, Head<Number> dq,
              Head<Number> dk, Head<Number> dv) {
  const Head<T> q = as_factor(given_q, seq, width, s.wide_q), k = as_factor(given_k, seq, width, s.wide_k),
                v = as_factor(given_v, seq, width, s.wide_v), dy = as_factor(given_dy, seq, width, s.wide_dy);
  constexpr int64_t kRows = kRowsOfWord<T>;
  // Gradients of scores are both a left and a right operand. If a word is one row, both have one layout.
  Word* const words = kRows == 1 ? (Word*)s.slopes.data() : s.words.data();
  q.interleave(seq, width, s.q.data());
  q.pack_transpose(seq, width, s.q_t.data());
  dy.interleave(seq, width, s.dy.data());
  dy.pack_transpose(seq, width, s.dy_t.data());
  k.transpose(seq, width, s.words.data(), s.transposed.data());
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
    for (int64_t first = causal ? key : 0; first < seq; first += kQueries<T>, more = true) {
      const int64_t n = std::min(kQueries<T>, seq - first), stride = padded(n);
      multiply(keys, n, width, k.row(key), k.stride, s.q_t.data() + first, seq, s.scores.data(), stride);
      multiply(keys, n, width, v.row(key), v.stride, s.dy_t.data() + first, seq, s.gradients.data(),
               stride);
      for (int64_t i = 0; i < keys; i += kRows)
        for (int64_t j = 0; j < n; j += kLanes) {
          Parts<T> slopes;
          for (int64_t r = 0; r < kRows; r++) {
            const int64_t at = (i + r) * stride + j, of = key + i + r, query = first + j;
            const F32x16 exponent =
                read<F32x16>(s.scores.data() + at) * scale - read<F32x16>(s.lse.data() + query);
            F32x16 weight = exponential(select(exponent > 0.0f, F32x16{}, exponent));
            if (causal && of > query) weight = hide(weight, of, query, 0);
            slopes[r] = weight * scale *
                        (read<F32x16>(s.gradients.data() + at) - read<F32x16>(s.delta.data() + query));
            write(s.weights.data() + at, weight);
            if constexpr (kRows > 1) write(s.slopes.data() + at, slopes[r]);
          }
          write_words(words + i / kRows * stride + j, slopes);
        }
      multiply(keys, width, n, s.weights.data(), stride, s.dy.data() + first / kRows * width, width,
               s.dv.data(), width, more);
      multiply(keys, width, n, s.slopes.data(), stride, s.q.data() + first / kRows * width, width,
               s.dk.data(), width, more);
      multiply(width, n, keys, s.transposed.data() + key, seq, words, stride,
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

}  // namespace workhorse::attention

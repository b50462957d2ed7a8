// Attention of bfloat16, multiplied in pairs by oneDNN's batch-reduce gemm, which PyTorch calls `brgemm`.
#pragma once

#include <ATen/native/CPUBlas.h>

#include <array>
#include <cmath>
#include <vector>

#include "ops/training/attention.h"

namespace workhorse::attention {

// The element of a packed right operand: two rows, interleaved.
using Word = uint32_t;

// Packs a matrix into words (seq / 2, width).
inline void interleave(Head<BFloat16> from, int64_t seq, int64_t width, Word* to) {
  for (int64_t i = 0; i < seq; i += 2, to += width)
    for (int64_t j = 0; j < width; j++) to[j] = from.row(i)[j].bits | Word(from.row(i + 1)[j].bits) << 16;
}

// Packs the transpose into words (width / 2, seq).
inline void pack_transpose(Head<BFloat16> from, int64_t seq, int64_t width, Word* to) {
  transpose_words(seq, width / 2, from.at, from.stride / 2, to, seq);
}

// Writes the transpose (width, seq); `words` is scratch for its words.
inline void transpose(Head<BFloat16> from, int64_t seq, int64_t width, Word* words, BFloat16* to) {
  pack_transpose(from, seq, width, words);
  for (int64_t i = 0; i < width; i += 2, words += seq, to += 2 * seq)
    for (int64_t j = 0; j < seq; j++) {
      to[j].bits = uint16_t(words[j]);
      to[seq + j].bits = uint16_t(words[j] >> 16);
    }
}

// Fills n rows from the columns of a float matrix (width, n); `transposed` is scratch for (n, width).
inline void write_columns(Head<BFloat16> to, int64_t n, int64_t width, const float* from, int64_t from_stride,
                          float* transposed) {
  transpose_words(width, n, from, from_stride, transposed, width);
  for (int64_t i = 0; i < n; i++)
    each(width, [&]<class V>(V, int64_t j) { write(to.row(i) + j, read<V>(transposed + i * width + j)); });
}

// c (rows, columns) = a (rows, depth) · b, or c += a · b if `more`. b holds words (depth / 2, columns).
inline void multiply(int64_t rows, int64_t columns, int64_t depth, const BFloat16* a, int64_t a_stride, const Word* b,
                     int64_t b_stride, float* c, int64_t c_stride, bool more = false) {
  at::native::cpublas::brgemm(rows, columns, depth, a_stride, b_stride, c_stride, more, (const at::BFloat16*)a,
                              (const at::BFloat16*)b, c);
}

// A vector of each of the rows that share a word.
using Parts = std::array<F32x16, 2>;

inline void write_words(Word* to, const Parts& rows) {
  put(to, convert<U32x16>(round(rows[0])) | convert<U32x16>(round(rows[1])) << 16);
}

// A thread's packed heads and tiles, allocated once for all its heads.
class Pairs {
 public:
  Pairs(int64_t seq, int64_t width) : seq_(seq), width_(width) {}
  Pairs(const Pairs&) = delete;
  ~Pairs() { at::native::cpublas::brgemm_release(); }

  // y, and the log-sum-exp of each query. Transposed,
  //   Yᵀ = Vᵀ softmax(K Qᵀ · scale + bias)
  void forward(Head<BFloat16> q, Head<BFloat16> k, Head<BFloat16> v, Scoring how, Head<BFloat16> y, float* lse) {
    float peaks[kBlock], inverses[kBlock];  // largest score, and 1 / Σ exp(score - peak), of each query
    Word *const q_t = room(q_t_, seq_ * width_ / 2), *const words = room(words_, seq_ * std::max(kBlock, width_) / 2);
    BFloat16* const v_t = room(transposed_, seq_ * width_);
    float *const scores = room(scores_, seq_ * kBlock), *const out = room(out_, width_ * kBlock);
    float* const wide = room(wide_, width_ * kBlock);
    pack_transpose(q, seq_, width_, q_t);
    transpose(v, seq_, width_, words, v_t);
    for (int64_t first = 0; first < seq_; first += kBlock) {
      const int64_t n = std::min(kBlock, seq_ - first), keys = how.causal ? first + n : seq_;
      multiply(keys, n, width_, k.at, k.stride, q_t + first, seq_, scores, kBlock);
      for (int64_t j = 0; j < n; j += kLanes) {
        const Scores score{scores + j, first + j, how};
        // None of these queries sees the keys from here on.
        const int64_t seen = how.causal ? std::min(keys, first + j + kLanes) : keys;
        const F32x16 peak = score.peak(seen);
        F32x16 total{};
        for (int64_t key = 0; key < keys; key += 2) {
          Parts weights{};
          F32x16 together{};
          for (int64_t r = 0; key < seen && r < 2; r++) together += weights[r] = exponential(score(key + r) - peak);
          total += together;
          write_words(words + key / 2 * kBlock + j, weights);
        }
        put(peaks + j, peak);
        put(inverses + j, 1.0f / total);
      }
      multiply(width_, n, keys, v_t, seq_, words, kBlock, out, kBlock);
      for (int64_t i = 0; i < width_; i++)
        for (int64_t j = 0; j < n; j++) out[i * kBlock + j] *= inverses[j];
      for (int64_t j = 0; j < n; j++) lse[first + j] = peaks[j] - std::log(inverses[j]);
      write_columns({y.row(first), y.stride}, n, width_, out, kBlock, wide);
    }
  }

  //   Pᵀ = exp(K Qᵀ · scale + bias - lse),  dPᵀ = V dYᵀ,  Sᵀ = Pᵀ (dPᵀ - Σ y dy) · scale
  //   dV = Pᵀ dY,  dK = Sᵀ Q,  dQᵀ = Kᵀ Sᵀ
  void backward(Head<BFloat16> q, Head<BFloat16> k, Head<BFloat16> v, Head<BFloat16> y, Head<BFloat16> dy,
                const float* lse, Scoring how, Head<BFloat16> dq, Head<BFloat16> dk, Head<BFloat16> dv) {
    constexpr int64_t kQueries = 512;  // queries of a tile: the tiles of a step together stay within the L2 cache
    const int64_t all = seq_ * width_, square = kBlock * padded(std::min(kQueries, seq_));
    Word *const q_pairs = room(q_, all / 2), *const q_t = room(q_t_, all / 2);
    Word *const dy_pairs = room(dy_, all / 2), *const dy_t = room(dy_t_, all / 2);
    Word* const words = room(words_, std::max(square, all) / 2);
    BFloat16 *const weights = room(weights_, square), *const slopes = room(slopes_, square);
    BFloat16* const k_t = room(transposed_, all);
    float *const scores = room(scores_, square), *const gradients = room(gradients_, square);
    float *const of_keys = room(dk_, kBlock * width_), *const of_values = room(dv_, kBlock * width_);
    float *const normalisers = room(lse_, padded(seq_)), *const deltas = room(deltas_, padded(seq_));
    interleave(q, seq_, width_, q_pairs);
    pack_transpose(q, seq_, width_, q_t);
    interleave(dy, seq_, width_, dy_pairs);
    pack_transpose(dy, seq_, width_, dy_t);
    transpose(k, seq_, width_, words, k_t);
    std::copy(lse, lse + seq_, normalisers);
    put_deltas(y, dy, seq_, width_, deltas);
    out_.assign(all, 0.0f);
    for (int64_t key = 0; key < seq_; key += kBlock) {
      const int64_t keys = std::min(kBlock, seq_ - key);
      bool more = false;
      for (int64_t first = how.causal ? key : 0; first < seq_; first += kQueries, more = true) {
        const int64_t n = std::min(kQueries, seq_ - first), stride = padded(n);
        multiply(keys, n, width_, k.row(key), k.stride, q_t + first, seq_, scores, stride);
        multiply(keys, n, width_, v.row(key), v.stride, dy_t + first, seq_, gradients, stride);
        for (int64_t i = 0; i < keys; i += 2)
          for (int64_t j = 0; j < n; j += kLanes) {
            Parts both;
            for (int64_t r = 0; r < 2; r++) {
              const int64_t at = (i + r) * stride + j, of = key + i + r, query = first + j;
              const F32x16 weight = weight_again(load<F32x16>(scores + at), load<F32x16>(normalisers + query), how, of,
                                                 query);
              both[r] = weight * how.scale * (load<F32x16>(gradients + at) - load<F32x16>(deltas + query));
              write(weights + at, weight);
              write(slopes + at, both[r]);
            }
            write_words(words + i / 2 * stride + j, both);
          }
        multiply(keys, width_, n, weights, stride, dy_pairs + first / 2 * width_, width_, of_values, width_, more);
        multiply(keys, width_, n, slopes, stride, q_pairs + first / 2 * width_, width_, of_keys, width_, more);
        multiply(width_, n, keys, k_t + key, seq_, words, stride, out_.data() + first, seq_, true);
      }
      for (int64_t i = 0; i < keys; i++)
        each(width_, [&]<class V>(V, int64_t j) {
          write(dk.row(key + i) + j, read<V>(of_keys + i * width_ + j));
          write(dv.row(key + i) + j, read<V>(of_values + i * width_ + j));
        });
    }
    write_columns(dq, seq_, width_, out_.data(), seq_, room(wide_, all));
  }

 private:
  int64_t seq_, width_;
  std::vector<Word> q_, q_t_, dy_, dy_t_, words_;
  std::vector<BFloat16> transposed_, weights_, slopes_;
  std::vector<float> lse_, deltas_, scores_, gradients_, out_, dk_, dv_, wide_;
};

}  // namespace workhorse::attention

// The product of a few rows and a weight that is read where it lies.
//
// C = A Wᵀ + bias. To put W in order takes as long as its product with some fifty rows (a dozen without AVX512-BF16).
// Here its words are broadcast from memory, and A, which is small, is put in order instead. Every number of C has the
// bits that `Product` gives it.
#pragma once

#include "ops/gemm/vectors.h"

namespace workhorse::gemm_vectors {

template <class T>
struct FewRows {
  const T *a, *w;  // (rows, k) and (columns, k), one row after the other
  int64_t rows, k;
  T* c;
  int64_t stride;  // of C
  const T* bias;   // for each column, or null

  static constexpr int64_t kMost = 256;  // rows; for more, `Product` is as fast

  // Whether W can be read where it lies, in whole words of memory.
  static bool suits(int64_t k) { return k % kPerWord == 0 && part_of<T>(k) % kPerWord == 0; }

  // The words of memory that `pack` and `run` need.
  int64_t room() const { return panels() * kWide * (words<T>(k) + kColumns); }

  // Puts A in order: for each part of k, panel by panel.
  void pack(Word* to) const {
    const Operand<T> all{a, k, true};
    for (int64_t from = 0; from < k; from += part_of<T>(k)) {
      const int64_t depth = std::min(part_of<T>(k), k - from);
      for (int64_t r = 0; r < rows; r += kWide, to += kWide * words<T>(depth))
        all.template pack<kWide>(r, std::min<int64_t>(kWide, rows - r), from, depth, to);
    }
  }

  // Computes columns [n, n_end) with what `pack` left there.
  void run(Word* packed, int64_t n, int64_t n_end) const {
    float* const totals = (float*)(packed + panels() * kWide * words<T>(k));
    const int64_t whole = n + (n_end - n) / kHigh * kHigh;
    for (int64_t j = n; j < whole; j += kColumns) columns(packed, j, std::min(whole, j + kColumns), totals);
    if (whole < n_end) Product<T>{{{{a, k, true}, {w, k, true}, k}}, c, stride, bias}.run(0, rows, whole, n_end);
  }

 private:
  static constexpr int64_t kColumns = 11 * kHigh;            // between which parts of k are added up
  static constexpr int kPerWord = sizeof(Word) / sizeof(T);  // numbers of W in a word of memory
  static constexpr int kSteps = kPerWord / kOfWord<T>;       // in which they are multiplied

  int64_t panels() const { return (rows + kWide - 1) / kWide; }

  void columns(const Word* packed, int64_t n, int64_t n_end, float* totals) const {
    for (int64_t from = 0; from < k; from += part_of<T>(k)) {
      const int64_t depth = words<T>(std::min(part_of<T>(k), k - from));
      const bool first = from == 0, last = from + part_of<T>(k) >= k;
      float* kept = totals;
      for (int64_t j = n; j < n_end; j += kHigh)
        for (int64_t p = 0; p < panels(); p++, kept += kHigh * kWide) {
          Sums sums;
          const T* const rows_of_w = w + j * k + from;
          if (p == 0) multiply<true>(rows_of_w, packed, depth, sums);
          else multiply<false>(rows_of_w, packed + p * kWide * depth, depth, sums);
          if (!first) each_sum([&](int i, int l) { sums[i][l] += load<F32x16>(kept + i * kWide + 16 * l); });
          if (last) put(sums, p * kWide, j);
          else each_sum([&](int i, int l) { workhorse::put(kept + i * kWide + 16 * l, sums[i][l]); });
        }
      packed += panels() * kWide * depth;
    }
  }

  // The products of kHigh rows of W and a panel of A; with `Ahead` it asks for the next rows of W meanwhile.
  template <bool Ahead>
  void multiply(const T* rows_of_w, const Word* panel, int64_t depth, Sums& result) const {
    Sums sums = {};  // which nobody else knows, so that GCC keeps them in registers
    for (int64_t d = 0; d < depth / kSteps; d++) {
      if (Ahead && d % 16 == 0)
        for (int i = 0; i < kHigh; i++) expect(rows_of_w + (kHigh + i) * k + d * kPerWord);
#pragma GCC unroll 2
      for (int step = 0; step < kSteps; step++, panel += kWide) {
        U32x16 words[kVectors];
#pragma GCC unroll 2
        for (int l = 0; l < kVectors; l++) words[l] = load<U32x16>(panel + 16 * l);
#pragma GCC unroll 12
        for (int i = 0; i < kHigh; i++) {
          const auto one = factor(load<Word>(rows_of_w + i * k + d * kPerWord), step);
#pragma GCC unroll 2
          for (int l = 0; l < kVectors; l++) sums[i][l] = add_product<T>(sums[i][l], one, words[l]);
        }
      }
    }
    each_sum([&](int i, int l) { result[i][l] = sums[i][l]; });
  }

  // What a step multiplies by: the whole word, or one of its two numbers as float32.
  static auto factor(Word all, int step) {
    if constexpr (kSteps == 1) return all;
    else return step == 0 ? (U32x16{} + all) << 16 : (U32x16{} + all) & 0xffff0000;
  }

  // Writes sums of kHigh columns, from column j on, by kWide rows, from row r on.
  void put(Sums& sums, int64_t r, int64_t j) const {
    if (bias) {
      const F32x16 all = first_of<16, F32x16>(bias + j, kHigh, [](const T* numbers) { return widen(numbers); });
      float each[16];
      workhorse::put(each, all);
      each_sum([&](int i, int l) { sums[i][l] += each[i]; });
    }
    for (int l = 0; l < kVectors; l++) {
      U32x16 lanes[16] = {};
      for (int i = 0; i < kHigh; i++) lanes[i] = as<U32x16>(sums[i][l]);
      transpose(lanes);
      for (int64_t i = 0; i < 16 && r + 16 * l + i < rows; i++) {
        T numbers[16];
        write(numbers, as<F32x16>(lanes[i]));
        std::copy_n(numbers, kHigh, c + (r + 16 * l + i) * stride + j);
      }
    }
  }
};

}  // namespace workhorse::gemm_vectors

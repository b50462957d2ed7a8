// The matmul of a few rows and a weight that is not packed.
//
// C = A Wᵀ + bias. Packing W takes as long as multiplying it by some fifty rows (a dozen if bfloat16 is widened). Here
// the words of W are broadcast from their place in memory, or from kHigh rows that are widened at a time. A, which is
// small, is packed instead. Every element of C has the same bits as with `Product`.
#pragma once

#include "ops/gemm/vectors.h"

namespace workhorse::gemm_vectors {

template <class T>
struct FewRows {
  const T *a, *w;  // (rows, k) and (columns, k), rows contiguous
  int64_t rows, k;
  T* c;
  int64_t stride;  // of C
  const T* bias;   // for each column, or null

  static constexpr int64_t kMost = 256;  // rows; for more, `Product` is as fast

  // True if W can be read row by row: in whole words, or widened.
  static bool suits(int64_t k) { return k % kOfWord<T> == 0; }

  // The number of words of memory that `pack` and `run` need.
  int64_t room() const {
    return panels() * kWide * (words<T>(k) + kColumns) + (kAsItLies<T> ? 0 : kHigh * kWhole + 16);
  }

  // Packs A: for each part of k, panel by panel.
  void pack(Word* to) const {
    const Operand<T> all{a, k, true};
    for (int64_t from = 0; from < k; from += part_of<T>(k)) {
      const int64_t depth = std::min(part_of<T>(k), k - from);
      for (int64_t r = 0; r < rows; r += kWide, to += kWide * words<T>(depth))
        all.template pack<kWide>(r, std::min<int64_t>(kWide, rows - r), from, depth, to);
    }
  }

  // Computes columns [n, n_end) from the memory that `pack` filled.
  void run(Word* packed, int64_t n, int64_t n_end) const {
    Word* const totals = packed + panels() * kWide * words<T>(k);
    Word* const widened = totals + panels() * kWide * kColumns;
    const int64_t whole = n + (n_end - n) / kHigh * kHigh;
    for (int64_t j = n; j < whole; j += kColumns)
      columns(packed, j, std::min(whole, j + kColumns), (float*)totals, widened);
    if (whole < n_end) Product<T>{{{{a, k, true}, {w, k, true}, k}}, c, stride, bias}.run(0, rows, whole, n_end);
  }

 private:
  static constexpr int64_t kColumns = 11 * kHigh;  // columns whose parts of k are added up together

  int64_t panels() const { return (rows + kWide - 1) / kWide; }

  void columns(const Word* packed, int64_t n, int64_t n_end, float* totals, Word* widened) const {
    for (int64_t from = 0; from < k; from += part_of<T>(k)) {
      const int64_t depth = words<T>(std::min(part_of<T>(k), k - from));
      const bool first = from == 0, last = from + part_of<T>(k) >= k;
      float* kept = totals;
      for (int64_t j = n; j < n_end; j += kHigh) {
        const T* const rows_of_w = w + j * k + from;
        if (!kAsItLies<T>) widen_rows(rows_of_w, depth, widened);
        const InPlace left =
            kAsItLies<T> ? InPlace{(const Word*)rows_of_w, k / kOfWord<T>} : InPlace{widened, depth};
        for (int64_t p = 0; p < panels(); p++, kept += kHigh * kWide) {
          Sums sums;
          multiply(left, p == 0 ? rows_of_w + kHigh * k : nullptr, packed + p * kWide * depth, depth, sums);
          if (!first) each_sum([&](int i, int l) { sums[i][l] += load<F32x16>(kept + i * kWide + 16 * l); });
          if (last) put(sums, p * kWide, j);
          else each_sum([&](int i, int l) { workhorse::put(kept + i * kWide + 16 * l, sums[i][l]); });
        }
      }
      packed += panels() * kWide * depth;
    }
  }

  // kHigh rows of W, one element per word.
  void widen_rows(const T* from, int64_t depth, Word* to) const {
    for (int i = 0; i < kHigh; i++, from += k, to += depth)
      for (int64_t d = 0; d < depth; d += 16) workhorse::put(to + d, load_words(from + d, depth - d));
  }

  // The products of kHigh rows of W and a panel of A. Meanwhile it prefetches the `later` rows of W, if any.
  void multiply(InPlace rows_of_w, const T* later, const Word* panel, int64_t depth, Sums& result) const {
    constexpr int64_t line = 64 / sizeof(T) / kOfWord<T>;  // words of W in a cache line
    Sums sums = {};  // a local without aliases, so that GCC keeps it in registers
    for (int64_t d = 0; d < depth; d++, rows_of_w.step(), panel += kWide) {
      if (later && d % line == 0)
        for (int i = 0; i < kHigh; i++) expect(later + i * k + d * kOfWord<T>);
      add_products<T>(sums, rows_of_w, panel);
    }
    each_sum([&](int i, int l) { result[i][l] = sums[i][l]; });
  }

  // Writes sums of kHigh columns from column j on, and kWide rows from row r on.
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

// The matmul of up to 16 rows and a weight that is not packed.
//
// The lanes of a vector are 16 columns of C, whose words of W are transposed in registers. `FewRows` computes as many
// sums for one row as for kWide. Every element of C has the same bits as with `Product`.
#pragma once

#include "ops/gemm/vectors.h"

namespace workhorse::gemm_vectors {

// Four words of each of 16 rows, in lanes of 16 bytes: rows 0, 4, 8 and 12 from `row` on, or half of them for a half.
template <class V, class T>
inline V words_of_rows(const T* row, int64_t stride) {
  constexpr int lanes = sizeof(V) / sizeof(Word);
  if constexpr (lanes == 4) {
    if constexpr (kAsItLies<T>) return load<V>(row);
    else return convert<V>(load<Vector<uint16_t, 4>>(row)) << 16;
  } else {
    using Half = Vector<Word, lanes / 2>;
    const Half low = words_of_rows<Half>(row, stride), high = words_of_rows<Half>(row + lanes / 2 * stride, stride);
    if constexpr (kHalved<V>) return {low, high};
    else
      return [&]<int... Lane>(std::integer_sequence<int, Lane...>) {
        return __builtin_shufflevector(low, high, Lane...);
      }(std::make_integer_sequence<int, lanes>());
  }
}

// In each lane of 16 bytes, interleaves two elements of `Element` of a and b: the first two, or the last two.
template <class Element, bool Last, class V>
inline V interleaved(V a, V b) {
  if constexpr (kHalved<V>) {
    return {interleaved<Element, Last>(a.low, b.low), interleaved<Element, Last>(a.high, b.high)};
  } else {
    constexpr int count = sizeof(V) / sizeof(Element), lane = 16 / sizeof(Element);
    using Elements = Register<Element, count>::type;
    return [&]<int... N>(std::integer_sequence<int, N...>) {
      return (V)__builtin_shufflevector((Elements)a, (Elements)b,
                                        (N / lane * lane + Last * lane / 2 + N % lane / 2 + N % 2 * count)...);
    }(std::make_integer_sequence<int, count>());
  }
}

// The first four words of 16 rows: vector n holds word n of each row.
template <class T>
inline void load_transposed(const T* rows, int64_t stride, U32x16 (&v)[4]) {
  U32x16 w[4];
  for (int i = 0; i < 4; i++) w[i] = words_of_rows<U32x16>(rows + i * stride, stride);
  const U32x16 a = interleaved<uint32_t, false>(w[0], w[1]), b = interleaved<uint32_t, false>(w[2], w[3]);
  const U32x16 c = interleaved<uint32_t, true>(w[0], w[1]), d = interleaved<uint32_t, true>(w[2], w[3]);
  v[0] = interleaved<uint64_t, false>(a, b);
  v[1] = interleaved<uint64_t, true>(a, b);
  v[2] = interleaved<uint64_t, false>(c, d);
  v[3] = interleaved<uint64_t, true>(c, d);
}

template <class T>
struct FewestRows {
  const T *a, *w;  // (rows, k) and (columns, k), rows contiguous
  int64_t rows, k;
  T* c;
  int64_t stride;  // of C
  const T* bias;   // for each column, or null

  static constexpr int64_t kMost = 16;  // rows
  static constexpr int kLanes = 16;

  // The number of words of memory that `pack` and `run` need.
  int64_t room() const { return width() * words<T>(k); }

  // Packs A: each word of k of all rows, padded with rows of zeros.
  void pack(Word* to) const {
    const int64_t wide = width(), depth = words<T>(k);
    std::fill(to, to + room(), 0);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t d = 0; d < depth; d += 16) {
        Word some[16];
        workhorse::put(some, load_words(a + r * k + d * kOfWord<T>, k - d * kOfWord<T>));
        for (int64_t i = 0; i < std::min<int64_t>(16, depth - d); i++) to[(d + i) * wide + r] = some[i];
      }
  }

  // Computes columns [n, n_end) from the memory that `pack` filled.
  void run(const Word* packed, int64_t n, int64_t n_end) const {
    const int64_t whole = n + (n_end - n) / kLanes * kLanes;
    if (whole < n_end) Product<T>{{{{a, k, true}, {w, k, true}, k}}, c, stride, bias}.run(0, rows, whole, n_end);
    n_end = whole;
    switch (width()) {
      case 1: return columns<1>(packed, n, n_end);
      case 2: return columns<2>(packed, n, n_end);
      case 3: return columns<3>(packed, n, n_end);
      case 4: return columns<4>(packed, n, n_end);
      case 6: return columns<6>(packed, n, n_end);
      case 8: return columns<8>(packed, n, n_end);
      case 12: return columns<12>(packed, n, n_end);
      default: return columns<16>(packed, n, n_end);
    }
  }

 private:
  // The number of rows that are computed.
  int64_t width() const { return rows <= 4 ? rows : rows <= 8 ? round_up(rows, 2) : round_up(rows, 4); }

  template <int R>
  void columns(const Word* packed, int64_t n, int64_t n_end) const {
    for (; n < n_end; n += kLanes) {
      F32x16 totals[R];
      for (int64_t from = 0; from < k; from += part_of<T>(k)) {
        F32x16 sums[R];
        multiply<R>(packed + from / kOfWord<T> * R, w + n * k + from, words<T>(std::min(part_of<T>(k), k - from)), sums);
        for (int r = 0; r < R; r++) totals[r] = from ? sums[r] + totals[r] : sums[r];
      }
      finish<R>(totals, n);
    }
  }

  // The sums of products of the rows of A and 16 rows of W, over `depth` words. Meanwhile it prefetches the next 16.
  template <int R>
  void multiply(const Word* packed, const T* rows_of_w, int64_t depth, F32x16 (&result)[R]) const {
    constexpr int64_t line = 64 / sizeof(T) / kOfWord<T>;  // words of W in a cache line
    F32x16 sums[R] = {};
    const auto add = [&](int64_t d, U32x16 word) {
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) sums[r] = add_product<T>(sums[r], packed[d * R + r], word);
    };
    int64_t d = 0;
    for (; d + 4 <= depth; d += 4) {
      const T* const now = rows_of_w + d * kOfWord<T>;
      if (d % line == 0)
        for (int i = 0; i < kLanes; i++) expect(now + (kLanes + i) * k);
      U32x16 v[4];
      load_transposed(now, k, v);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) add(d + i, v[i]);
    }
    for (; d < depth; d++) {
      Word word[kLanes];
      for (int i = 0; i < kLanes; i++) word[i] = load_words(rows_of_w + i * k + d * kOfWord<T>, kOfWord<T>)[0];
      add(d, load<U32x16>(word));
    }
    for (int r = 0; r < R; r++) result[r] = sums[r];
  }

  template <int R>
  void finish(F32x16 (&totals)[R], int64_t n) const {
    for (int64_t r = 0; r < rows; r++) {
      if (bias) totals[r] += widen(bias + n);
      write(c + r * stride + n, totals[r]);
    }
  }
};

}  // namespace workhorse::gemm_vectors

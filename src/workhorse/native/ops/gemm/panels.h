// Operands of a gemm with vectors: their layout in memory, and panels of them.
//
// A panel holds, for each word of k in turn, that word of each of its lanes, which are rows of A or columns of B. A
// word is one float32, or two bfloat16 that are adjacent along k. If bfloat16 is not multiplied in pairs (`kPairs`), a
// word is one bfloat16, widened.
#pragma once

#include "simd/elementwise.h"
#include "simd/transpose.h"

namespace workhorse::gemm_vectors {

using Word = uint32_t;

template <class T>
constexpr int kOfWord = kPairs ? sizeof(Word) / sizeof(T) : 1;  // elements of a word

// True if a word is four bytes copied from memory, not a widened element.
template <class T>
constexpr bool kAsItLies = kOfWord<T> * sizeof(T) == sizeof(Word);

constexpr int64_t kAhead = 64;  // words of a row to prefetch before packing

template <class T>
constexpr int64_t words(int64_t numbers) { return (numbers + kOfWord<T> - 1) / kOfWord<T>; }

// `numbers` of at most N elements, then zeros.
template <int N, class V, class T, class F>
inline V first_of(const T* from, int64_t numbers, F read) {
  if (numbers >= N) return read(from);
  T kept[N] = {};
  for (int64_t n = 0; n < numbers; n++) kept[n] = from[n];
  return read(kept);
}

// At most 16 words, of the given number of elements; zeros after them.
template <class T>
inline U32x16 load_words(const T* from, int64_t numbers) {
  return first_of<16 * kOfWord<T>, U32x16>(from, numbers, [](const T* all) {
    if constexpr (kAsItLies<T>) return load<U32x16>(all);
    else return as<U32x16>(widen(all));
  });
}

// An operand in memory.
template <class T>
struct Operand {
  const T* at;
  int64_t stride;  // elements from one row to the next
  bool along;      // true if k runs along the rows

  // Packs `lanes` lanes from `lane` on and `depth` k from `k` on into a panel of W lanes, a multiple of 16,
  // padded with zeros.
  template <int W>
  void pack(int64_t lane, int64_t lanes, int64_t k, int64_t depth, Word* to) const {
    if (along)
      pack_rows<W>(at + lane * stride + k, lanes, depth, to);
    else
      pack_columns<W>(at + k * stride + lane, lanes, depth, to);
  }

 private:
  template <int W>
  void pack_rows(const T* from, int64_t lanes, int64_t depth, Word* to) const {
    for (int64_t k = 0; k < words<T>(depth); k += 16)
      for (int g = 0; g < W; g += 16) {
        U32x16 v[16];
        for (int i = 0; i < 16; i++) {
          const T* const row = from + (g + i) * stride + k * kOfWord<T>;
          const bool there = g + i < lanes;
          expect(row + kAhead * kOfWord<T>);
          v[i] = there ? load_words(row, depth - k * kOfWord<T>) : U32x16{};
        }
        transpose(v);
        for (int i = 0; i < 16 && k + i < words<T>(depth); i++) put(to + (k + i) * W + g, v[i]);
      }
  }

  template <int W>
  void pack_columns(const T* from, int64_t lanes, int64_t depth, Word* to) const {
    for (int64_t k = 0; k < depth; k += kOfWord<T>, from += kOfWord<T> * stride, to += W)
      for (int g = 0; g < W; g += 16) put(to + g, of_lanes(from + g, lanes - g, k + 1 < depth));
  }

  // A word of each of 16 lanes; `more`: true if its second element exists.
  U32x16 of_lanes(const T* from, int64_t lanes, bool more) const {
    if constexpr (kOfWord<T> == 1) {
      return load_words(from, lanes);
    } else {
      const auto bits = [&](const T* row) {
        return first_of<16, U32x16>(row, lanes, [](const T* all) { return convert<U32x16>(load<U16x16>(all)); });
      };
      return more ? bits(from) | bits(from + stride) << 16 : bits(from);
    }
  }
};

}  // namespace workhorse::gemm_vectors

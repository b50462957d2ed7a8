// Operands of a gemm in vectors: how they lie in memory, and panels of them.
//
// A panel holds, for one word of k after the other, that word of each of its lanes: rows of A or columns of B.
// A word is one number of float32 or two of bfloat16, neighbours along k.
#pragma once

#include <type_traits>

#include "simd/bf16.h"
#include "simd/transpose.h"

namespace workhorse::gemm_vectors {

#ifdef __AVX512F__

using Word = uint32_t;

template <class T>
constexpr int kOfWord = sizeof(Word) / sizeof(T);  // numbers

template <class T>
constexpr int64_t words(int64_t numbers) { return (numbers + kOfWord<T> - 1) / kOfWord<T>; }

inline __mmask16 first(int64_t count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (1u << count) - 1; }

// Up to 16 words, of so many numbers; zeros after them.
inline __m512i load_words(const float* from, int64_t numbers) {
  return _mm512_maskz_loadu_epi32(first(numbers), from);
}

inline __m512i load_words(const BFloat16* from, int64_t numbers) {
  const __mmask32 there = numbers >= 32 ? 0xffffffff : numbers <= 0 ? 0 : (1u << numbers) - 1;
  return _mm512_maskz_loadu_epi16(there, from);
}

// One operand in memory.
template <class T>
struct Operand {
  const T* at;
  int64_t stride;  // numbers from one row to the next
  bool along;      // whether k runs along the rows

  // Packs `lanes` lanes from `lane` on and `depth` k from `k` on into a panel of W lanes, a multiple of 16,
  // padded with zeros.
  template <int W>
  void pack(int64_t lane, int64_t lanes, int64_t k, int64_t depth, Word* to) const {
    if (along)
      turn<W>(at + lane * stride + k, lanes, depth, to);
    else
      copy<W>(at + k * stride + lane, lanes, depth, to);
  }

 private:
  template <int W>
  void turn(const T* from, int64_t lanes, int64_t depth, Word* to) const {
    for (int64_t k = 0; k < words<T>(depth); k += 16)
      for (int g = 0; g < W; g += 16) {
        __m512i v[16];
        for (int i = 0; i < 16; i++) {
          const bool there = g + i < lanes;
          v[i] = there ? load_words(from + (g + i) * stride + k * kOfWord<T>, depth - k * kOfWord<T>)
                       : __m512i{};
        }
        transpose(v);
        for (int i = 0; i < 16 && k + i < words<T>(depth); i++)
          _mm512_storeu_si512(to + (k + i) * W + g, v[i]);
      }
  }

  template <int W>
  void copy(const T* from, int64_t lanes, int64_t depth, Word* to) const {
    for (int64_t k = 0; k < depth; k += kOfWord<T>, from += kOfWord<T> * stride, to += W)
      for (int g = 0; g < W; g += 16)
        _mm512_storeu_si512(to + g, of_lanes(from + g, lanes - g, k + 1 < depth));
  }

  // A word of each of 16 lanes; `more`: whether its second number is there.
  __m512i of_lanes(const float* from, int64_t lanes, bool) const { return load_words(from, lanes); }

  __m512i of_lanes(const BFloat16* from, int64_t lanes, bool more) const {
    const __mmask16 there = first(lanes);
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, from));
    if (!more) return low;
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, from + stride));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
  }
};

#endif  // __AVX512F__

}  // namespace workhorse::gemm_vectors

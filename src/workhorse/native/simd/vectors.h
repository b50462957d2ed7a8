// Vectors of 64 bytes, for any CPU: the compiler splits a vector if it must.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace workhorse {

typedef float F32x16 __attribute__((vector_size(64)));
typedef uint32_t U32x16 __attribute__((vector_size(64)));
typedef uint16_t U16x16 __attribute__((vector_size(32)));

template <class V>
inline V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

// By halves: adding one lane after the other would wait for every addition.
inline float sum(F32x16 v) {
  v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15);
  return (v[0] + v[2]) + (v[1] + v[3]);
}

// Prefetches a line that is read a block of rows later, into the second cache: the first is small, and
// rows a power of two apart would evict each other. Past the end it does nothing.
inline void expect(const void* line) { __builtin_prefetch(line, 0, 2); }

}  // namespace workhorse

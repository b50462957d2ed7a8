// Sums of the numbers of vectors, 16 vectors at a time.
#pragma once

#include "simd/vectors.h"

namespace workhorse {

// `sum` of each of 16 vectors, to the bit. Every round adds the two halves of what is left of each vector,
// and puts what comes of two of them into one: 15 additions of vectors in place of 64.
inline F32x16 sums(const F32x16 (&v)[16]) {
  const auto halves = [](F32x16 a, F32x16 b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  };
  const auto quarters = [](F32x16 a, F32x16 b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  };
  const auto pairs = [](F32x16 a, F32x16 b) {
    return __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  };
  const auto numbers = [](F32x16 a, F32x16 b) {
    return __builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
           __builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
  };
  F32x16 fours[4];
  for (int i = 0; i < 4; i++)
    fours[i] = quarters(halves(v[i], v[4 + i]), halves(v[8 + i], v[12 + i]));
  return numbers(pairs(fours[0], fours[1]), pairs(fours[2], fours[3]));
}

}  // namespace workhorse

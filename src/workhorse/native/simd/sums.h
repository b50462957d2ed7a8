// Sums of the numbers of vectors, 16 vectors at a time.
#pragma once

#include "simd/vectors.h"

namespace workhorse {

// Lane n: the `sum` of vector n, to the bit. Every round adds the two halves of what is left of each vector,
// and puts what comes of two of them into one: 15 additions of vectors in place of 64.
inline F32x16 sums(const F32x16 (&v)[16]) {
  F32x16 eights[8];
  for (int n = 0; n < 8; n++) eights[n] = fold<8>(v[n], v[n + 8]);
  for (int n = 0; n < 4; n++) eights[n] = fold<4>(eights[n], eights[n + 4]);
  for (int n = 0; n < 2; n++) eights[n] = fold<2>(eights[n], eights[n + 2]);
  return fold<1>(eights[0], eights[1]);
}

}  // namespace workhorse

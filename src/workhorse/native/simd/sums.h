// Sums of the lanes of vectors, 16 vectors at a time.
#pragma once

#include "simd/vectors.h"

namespace workhorse {

// Lane n of the result is the `sum` of vector n, bitwise. Each round adds the two halves of what remains of each
// vector, and packs two results into one vector: 15 vector additions instead of 64.
inline F32x16 sums(const F32x16 (&v)[16]) {
  F32x16 eights[8];
  for (int n = 0; n < 8; n++) eights[n] = fold<8>(v[n], v[n + 8]);
  for (int n = 0; n < 4; n++) eights[n] = fold<4>(eights[n], eights[n + 4]);
  for (int n = 0; n < 2; n++) eights[n] = fold<2>(eights[n], eights[n + 2]);
  return fold<1>(eights[0], eights[1]);
}

}  // namespace workhorse

// 16 × 16 numbers of 32 bits, rows and columns exchanged: how lanes become rows.
#pragma once

#include "simd/vectors.h"

namespace workhorse {

#ifdef __AVX512F__

// In four rounds, the n-th exchanging rows and columns that differ in bit n of their number.
inline void transpose(__m512i (&v)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      v[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      v[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int j = 0; j < 4; j++) {
    t[j] = _mm512_shuffle_i32x4(v[j], v[j + 4], 0x88);
    t[j + 4] = _mm512_shuffle_i32x4(v[j], v[j + 4], 0xdd);
    t[j + 8] = _mm512_shuffle_i32x4(v[j + 8], v[j + 12], 0x88);
    t[j + 12] = _mm512_shuffle_i32x4(v[j + 8], v[j + 12], 0xdd);
  }
  for (int j = 0; j < 8; j++) {
    v[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
    v[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
  }
}

#endif

}  // namespace workhorse

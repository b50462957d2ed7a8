// The tile instructions of Intel's matrix unit (AMX) emulated with vectors, for tests on a CPU without the unit.
//
// Code for the unit is compiled unchanged. This file replaces only what an instruction does to its tiles, bit by bit as
// in Intel's manual. The compiler includes this file first (`workhorse/devices/instructions.py`).
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "simd/subnormals.h"

namespace workhorse::emulated {

constexpr int kRows = 16, kRowBytes = 64;

// The tiles of a thread. All have full size: no code here configures another size.
struct Tiles {
  alignas(64) char row[8][kRows][kRowBytes];
  bool configured = false;
};

// Returns the thread's tiles. An instruction without a configuration ends the process, as on the unit.
inline Tiles& tiles(bool configured = true) {
  static thread_local Tiles mine;
  if (configured && !mine.configured) std::abort();
  return mine;
}

inline void configure(const void*) { tiles(false).configured = true; }

inline void release() { tiles(false).configured = false; }

inline void zero(int tile) { std::memset(tiles().row[tile], 0, sizeof(Tiles::row[0])); }

inline void load(int tile, const void* from, int64_t stride) {
  for (int r = 0; r < kRows; r++) std::memcpy(tiles().row[tile][r], (const char*)from + r * stride, kRowBytes);
}

inline void store(int tile, void* to, int64_t stride) {
  for (int r = 0; r < kRows; r++) std::memcpy((char*)to + r * stride, tiles().row[tile][r], kRowBytes);
}

// c += a b. A row of `a` is 16 pairs of bfloat16. Row k of `b` holds the pairs that pair k is multiplied by, one for
// each element of c. First and second elements of the pairs are summed separately; subnormal values are zero.
__attribute__((noinline)) inline void multiply(int c, int a, int b) {
  const TakingSubnormalsForZero scope;
  Tiles& mine = tiles();
  const __m512i upper = _mm512_set1_epi32(0xffff0000);
  for (int m = 0; m < kRows; m++) {
    __m512 first = _mm512_setzero_ps(), second = _mm512_setzero_ps();
    for (int k = 0; k < kRowBytes / 4; k++) {
      int32_t pair;
      std::memcpy(&pair, mine.row[a][m] + 4 * k, 4);
      const __m512i x = _mm512_set1_epi32(pair), w = _mm512_load_si512(mine.row[b][k]);
      first = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
                              _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)), first);
      second = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(x, upper)),
                               _mm512_castsi512_ps(_mm512_and_si512(w, upper)), second);
    }
    float* const sum = (float*)mine.row[c][m];
    _mm512_store_ps(sum, _mm512_add_ps(_mm512_load_ps(sum), _mm512_add_ps(first, second)));
  }
}

}  // namespace workhorse::emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig workhorse::emulated::configure
#define _tile_release workhorse::emulated::release
#define _tile_zero workhorse::emulated::zero
#define _tile_loadd workhorse::emulated::load
#define _tile_stream_loadd workhorse::emulated::load
#define _tile_stored workhorse::emulated::store
#define _tile_dpbf16ps workhorse::emulated::multiply
#define __AMX_BF16__ 1
#define WORKHORSE_EMULATED_TILES

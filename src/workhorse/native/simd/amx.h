// The matrix unit of Intel CPUs (AMX). A tile is 16 rows of 64 bytes; a row holds 32 bfloat16 or 16 float32 elements.
#pragma once

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>

#include "ops/scratch.h"
#include "simd/bf16.h"

namespace workhorse {

constexpr int kTile = 16;   // rows of a tile
constexpr int kDepth = 32;  // bfloat16 elements in a row of a tile

// A process must ask Linux for permission to use tiles; some virtual machines refuse.
inline bool tiles_allowed() {
#ifdef WORKHORSE_EMULATED_TILES
  return true;
#else
  constexpr int request_permission = 0x1023, tile_data = 18;
  static const bool allowed = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  return allowed;
#endif
}

// Configures all tiles at full size for its lifetime.
struct Tiles {
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  Tiles() { _tile_loadconfig(&config); }
  ~Tiles() { _tile_release(); }
};

// The elements along k whose products the unit sums before the sum is added to the sums of earlier parts of k. An
// element of a bfloat16 number that is split in `parts` counts as several.
inline int64_t tile_part(int64_t k, int64_t parts = 1) {
  constexpr int64_t kWhole = 1536;  // the longest k that is not cut
  constexpr int64_t kCut = 512;
  return k <= kWhole / parts ? round_up(k, kDepth) : even_part(k, kCut / parts, kDepth);
}

// Memory barrier: GCC does not know that loading a tile reads memory.
inline void written() { asm volatile("" ::: "memory"); }

inline __mmask16 first(int64_t count) { return count < 16 ? (1u << count) - 1 : 0xffff; }

// Interleaves two rows of bfloat16 that are adjacent in memory.
inline __m512i woven(__m512i both) {
  alignas(64) static constexpr uint16_t order[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(order), both);
}

}  // namespace workhorse

#endif  // __AMX_BF16__

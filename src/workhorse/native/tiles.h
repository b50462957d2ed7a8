// The same product on the matrix unit of Intel's CPUs (AMX), for 2 rows of x and more.
//
// A tile is 16 rows of 64 bytes. The unit computes C[m][n] += Σ_k A[m][k] B[k][n] over 32 k at a time:
//
//   A   16 outputs × 32 k of W, straight from where `nn.Linear` holds it (rows `in` numbers apart)
//   B   32 k × 16 rows of x, in the order the unit wants: pairs of k beside each other,
//       B[k / 2][row][k % 2]; x is put into this order once per call, and is small
//   C   16 outputs × 16 rows, float32
//
// Up to four tiles C share each tile A, so W is read once for up to 64 rows.
#pragma once

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <memory>

#include "transpose.h"
#include "vectors.h"

namespace workhorse {

#ifdef __AMX_BF16__

constexpr int kTile = 16;    // rows of a tile
constexpr int kDepth = 32;   // numbers of bfloat16 in a row of a tile
constexpr int kColumns = 4;  // tiles C that share a tile A

// Linux gives a process the tiles when it asks for them; some virtual machines refuse.
inline bool tiles_allowed() {
  constexpr int request_permission = 0x1023, tile_data = 18;
  static const bool allowed = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  return allowed;
}

// The shapes of the tiles, for as long as it lives: all of them full.
struct Tiles {
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  Tiles() { _tile_loadconfig(&config); }
  ~Tiles() { _tile_release(); }
};

// GCC does not know that loading a tile reads memory.
inline void written() { asm volatile("" ::: "memory"); }

inline __mmask16 first(int64_t count) { return count < 16 ? (1u << count) - 1 : 0xffff; }

struct TiledLinear {
  const BFloat16 *x, *bias;  // bias may be null
  BFloat16* y;
  int64_t rows, in, out;
  int64_t columns = (rows + kTile - 1) / kTile;     // tiles that the rows of x fill
  int64_t steps = (in + kDepth - 1) / kDepth;       // tiles along `in`
  std::unique_ptr<uint32_t[]> b{new uint32_t[columns * steps * kTile * kTile]};

  // Put x in order: tiles B of columns `begin` to `end`.
  void pack(int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c++)
      for (int64_t s = 0; s < steps; s++) {
        __m512i v[16] = {};
        const int64_t r = c * kTile, height = std::min<int64_t>(kTile, rows - r);
        const int64_t width = in - s * kDepth;
        for (int i = 0; i < height; i++)
          v[i] = _mm512_maskz_loadu_epi16(width < 32 ? (1u << width) - 1 : ~0u,
                                          x + (r + i) * in + s * kDepth);
        transpose(v);
        for (int i = 0; i < 16; i++)
          _mm512_storeu_si512(b.get() + ((c * steps + s) * kTile + i) * kTile, v[i]);
      }
  }

  // Outputs `o` to `o + 16` of every row, from a block of 16 rows of W.
  void block(int64_t o, const BFloat16* w, bool from_memory) const {
    for (int64_t c = 0; c < columns; c += kColumns) {
      const bool fetch = from_memory && c == 0;
      switch (columns - c) {
        case 1: product<1>(o, c, w, fetch); break;
        case 2: product<2>(o, c, w, fetch); break;
        case 3: product<3>(o, c, w, fetch); break;
        default: product<4>(o, c, w, fetch);
      }
    }
  }

 private:
  template <int C>
  void product(int64_t o, int64_t column, const BFloat16* w, bool fetch) const {
    const int64_t height = std::min<int64_t>(kTile, out - o), stride = steps * kTile * kTile;
    const uint32_t* from = b.get() + column * stride;
    _tile_zero(0);
    if constexpr (C > 1) _tile_zero(1);
    if constexpr (C > 2) _tile_zero(2);
    if constexpr (C > 3) _tile_zero(3);
    for (int64_t k = 0; k < in; k += kDepth, w += kDepth, from += kTile * kTile) {
      if (height == kTile && k + kDepth <= in) {
        if (fetch)
          for (int i = 0; i < kTile; i++) expect(w + (kTile + i) * in);
        _tile_loadd(4, w, in * 2);
      } else {
        load_edge(w, height, std::min<int64_t>(kDepth, in - k));
      }
      _tile_loadd(5, from, 64);
      _tile_dpbf16ps(0, 4, 5);
      if constexpr (C > 1) {
        _tile_loadd(6, from + stride, 64);
        _tile_dpbf16ps(1, 4, 6);
      }
      if constexpr (C > 2) {
        _tile_loadd(7, from + 2 * stride, 64);
        _tile_dpbf16ps(2, 4, 7);
      }
      if constexpr (C > 3) {
        _tile_loadd(5, from + 3 * stride, 64);
        _tile_dpbf16ps(3, 4, 5);
      }
    }
    alignas(64) float c[C][kTile][kTile];
    _tile_stored(0, c[0], 64);
    if constexpr (C > 1) _tile_stored(1, c[1], 64);
    if constexpr (C > 2) _tile_stored(2, c[2], 64);
    if constexpr (C > 3) _tile_stored(3, c[3], 64);
    for (int i = 0; i < C; i++) finish(c[i], o, (column + i) * kTile, height);
  }

  // A tile C into 16 rows of y.
  void finish(const float (&c)[kTile][kTile], int64_t o, int64_t r, int64_t height) const {
    __m512i v[16];
    for (int i = 0; i < 16; i++) v[i] = _mm512_load_si512(c[i]);
    transpose(v);
    const __mmask16 mask = first(height);
    const __m512 add = bias ? (__m512)widen((U16x16)_mm256_maskz_loadu_epi16(mask, bias + o)) : __m512{};
    for (int i = 0; i < std::min<int64_t>(kTile, rows - r); i++)
      _mm256_mask_storeu_epi16(y + (r + i) * out + o, mask,
                               (__m256i)_mm512_cvtneps_pbh(_mm512_add_ps((__m512)v[i], add)));
  }

  // A tile A that hangs over the edge of W, filled up with zeros.
  void load_edge(const BFloat16* w, int64_t height, int64_t width) const {
    alignas(64) BFloat16 whole[kTile][kDepth] = {};
    for (int64_t i = 0; i < height; i++)
      std::memcpy(whole[i], w + i * in, width * sizeof(BFloat16));
    written();
    _tile_loadd(4, whole, 64);
  }
};

#endif  // __AMX_BF16__

}  // namespace workhorse

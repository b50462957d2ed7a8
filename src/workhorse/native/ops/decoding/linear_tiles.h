// linear.h on the matrix unit (simd/amx.h), for two or more rows of x. The unit computes
// C[m][n] += Σ_k A[m][k] B[k][n] over 32 k at a time:
//
//   A   16 outputs × 32 k of W, loaded in place from the weight of `nn.Linear` (leading dimension `in`)
//   B   32 k × 16 rows of x, in the order of the unit, pairs of k adjacent: B[k / 2][row][k % 2];
//       x is small and packed once per call
//   C   16 outputs × 16 rows, float32
//
// The rounding of an element depends only on the length of its sum, and is that of ops/gemm/tiles.h.
// Two tiles of A are multiplied by two tiles of B at a time. W is read from memory once; if x has more
// than 32 rows, the next two tiles of B find the two rows of tiles of A in the L2 cache.
#pragma once

#include <algorithm>

#include "ops/decoding/linear.h"
#include "simd/amx.h"
#include "simd/transpose.h"

namespace workhorse::linear {

#ifdef __AMX_BF16__

constexpr int64_t kHigh = 2 * kTile;  // outputs at a time
constexpr int kBeside = 2;            // tiles of B at a time

// Rows of x packed for the unit; they can be multiplied by any number of weights. `b` points to `room()` words.
struct TiledRows {
  const BFloat16* x;
  int64_t rows, in;
  uint32_t* b = nullptr;
  int64_t columns = (rows + kTile - 1) / kTile;     // tiles that the rows of x fill
  int64_t steps = (in + kDepth - 1) / kDepth;       // tiles along `in`

  int64_t room() const { return columns * steps * kTile * kTile; }

  // Packs x: columns [begin, end) of tiles of B.
  void pack(int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c++)
      for (int64_t s = 0; s < steps; s++) {
        U32x16 v[16] = {};
        const int64_t r = c * kTile, height = std::min<int64_t>(kTile, rows - r);
        const int64_t width = in - s * kDepth;
        for (int i = 0; i < height; i++)
          v[i] = (U32x16)_mm512_maskz_loadu_epi16(width < 32 ? (1u << width) - 1 : ~0u,
                                                  x + (r + i) * in + s * kDepth);
        transpose(v);
        for (int i = 0; i < 16; i++) put(b + ((c * steps + s) * kTile + i) * kTile, v[i]);
      }
  }

  // Computes outputs [begin, end) of a layer, for every row.
  void run(const Layer<BFloat16>& layer, int64_t begin, int64_t end) const {
    for (int64_t o = begin; o < end; o += kHigh)
      block(layer, o, std::min(end - o, kHigh), layer.weight + o * in);
  }

  // Computes `height` outputs, up to 32, from `o` on, for every row; `w` points to their weights.
  void block(const Layer<BFloat16>& layer, int64_t o, int64_t height, const BFloat16* w) const {
    for (int64_t c = 0; c < columns; c += kBeside) {
      const bool two = columns - c > 1;
      if (height == kHigh && in % kDepth == 0)
        two ? product<2, 2>(layer, o, height, c, w) : product<2, 1>(layer, o, height, c, w);
      else
        for (int64_t i = 0; i < height; i += kTile) {
          const int64_t rest = std::min<int64_t>(height - i, kTile);
          two ? product<1, 2>(layer, o + i, rest, c, w + i * in)
              : product<1, 1>(layer, o + i, rest, c, w + i * in);
        }
    }
  }

 private:
  template <int A, int C>
  void product(const Layer<BFloat16>& layer, int64_t o, int64_t height, int64_t column,
               const BFloat16* w) const {
    const int64_t stride = steps * kTile * kTile;
    const uint32_t* from = b + column * stride;
    const int64_t deep = tile_part(in);
    alignas(64) float c[2][2][kTile][kTile];
    for (int64_t k = 0; k < in; k += deep) {
      alignas(64) float part[2][2][kTile][kTile];
      sum<A, C>(w, from, height, k, std::min(deep, in - k), k ? part : c);
      w += deep;
      from += deep / kDepth * kTile * kTile;
      if (k == 0) continue;
      for (int i = 0; i < A; i++)
        for (int j = 0; j < C; j++)
          for (int r = 0; r < kTile; r++) put(c[i][j][r], load<F32x16>(c[i][j][r]) + load<F32x16>(part[i][j][r]));
    }
    for (int i = 0; i < A; i++)
      for (int j = 0; j < C; j++)
        finish(layer, c[i][j], o + i * kTile, (column + j) * kTile, std::min<int64_t>(height, kTile));
  }

  // Sums products of `depth` elements from element `begin` on, which `w` and `from` point to.
  template <int A, int C>
  void sum(const BFloat16* w, const uint32_t* from, int64_t height, int64_t begin, int64_t depth,
           float (&c)[2][2][kTile][kTile]) const {
    const int64_t stride = steps * kTile * kTile;
    _tile_zero(0);
    if constexpr (C > 1) _tile_zero(1);
    if constexpr (A > 1) _tile_zero(2);
    if constexpr (A * C > 3) _tile_zero(3);
    for (int64_t k = begin; k < begin + depth; k += kDepth, w += kDepth, from += kTile * kTile) {
      if (A > 1 || (height == kTile && k + kDepth <= in))
        _tile_loadd(4, w, in * 2);
      else
        load_edge(w, height, std::min<int64_t>(kDepth, in - k));
      _tile_loadd(6, from, 64);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (C > 1) {
        _tile_loadd(7, from + stride, 64);
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (A > 1) {
        _tile_loadd(5, w + kTile * in, in * 2);
        _tile_dpbf16ps(2, 5, 6);
      }
      if constexpr (A * C > 3) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c[0][0], 64);
    if constexpr (C > 1) _tile_stored(1, c[0][1], 64);
    if constexpr (A > 1) _tile_stored(2, c[1][0], 64);
    if constexpr (A * C > 3) _tile_stored(3, c[1][1], 64);
    written();
  }

  // Transposes a tile of C into 16 rows of y, the bias added.
  void finish(const Layer<BFloat16>& layer, const float (&c)[kTile][kTile], int64_t o, int64_t r,
              int64_t height) const {
    U32x16 v[16];
    for (int i = 0; i < 16; i++) v[i] = load<U32x16>(c[i]);
    transpose(v);
    const __mmask16 mask = first(height);
    const __m512 add =
        layer.bias ? (__m512)widen((U16x16)_mm256_maskz_loadu_epi16(mask, layer.bias + o)) : __m512{};
    for (int i = 0; i < std::min<int64_t>(kTile, rows - r); i++)
      _mm256_mask_storeu_epi16(layer.y + (r + i) * layer.out + o, mask,
                               (__m256i)round((F32x16)_mm512_add_ps((__m512)v[i], add)));
  }

  // Loads a tile of A that crosses the edge of W, padded with zeros.
  void load_edge(const BFloat16* w, int64_t height, int64_t width) const {
    alignas(64) BFloat16 whole[kTile][kDepth] = {};
    for (int64_t i = 0; i < height; i++)
      std::memcpy(whole[i], w + i * in, width * sizeof(BFloat16));
    written();
    _tile_loadd(4, whole, 64);
  }
};

#endif  // __AMX_BF16__

}  // namespace workhorse::linear

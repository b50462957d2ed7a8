// `packed_linear.h` on the matrix unit of Intel CPUs (AMX), for many rows of x in bfloat16.
//
// The codes of a block and a group are in the order of the unit's right operand: 16 adjacent outputs,
// each with four k. So W is expanded into tiles lane by lane, rounded to bfloat16, in a few instructions per
// vector; a thread keeps the tiles of two blocks and multiplies all rows of x by them. x is packed into
// contiguous tiles once per call.
#pragma once

#include <memory>

#include "ops/decoding/packed_linear.h"
#include "simd/amx.h"

namespace workhorse::packed_linear {

#ifdef __AMX_BF16__

// Aligned so that each row is one cache line: a row that crosses two lines is loaded at half the speed.
struct alignas(64) Tile {
  BFloat16 numbers[kTile][kDepth];
};

constexpr int kManyRows = 12;  // minimum rows for which this is faster than `packed_linear.h`

template <int Bits>
struct PackedTiles {
  PackedWeight<Bits> weight;
  const BFloat16 *x, *bias;  // bias may be null
  BFloat16* y;
  int64_t rows, out;
  int64_t blocks = (out + kLanes - 1) / kLanes;
  int64_t tiles = (rows + kTile - 1) / kTile;  // tiles that the rows of x fill
  std::unique_ptr<Tile[]> a{new Tile[tiles * weight.groups]};

  // Packs tiles [begin, end) of x.
  void pack(int64_t begin, int64_t end) {
    const int64_t in = weight.groups * kGroup;
    for (int64_t t = begin; t < end; t++)
      for (int64_t g = 0; g < weight.groups; g++)
        for (int64_t i = 0; i < kTile; i++) {
          const int64_t r = t * kTile + i;
          const __m512i line = r < rows ? load<__m512i>(x + r * in + g * kGroup) : __m512i{};
          _mm512_store_si512(a[t * weight.groups + g].numbers[i], line);
        }
  }

  // Computes pairs [begin, end) of blocks of 16 outputs, for every row of x.
  void run(int64_t begin, int64_t end) const {
    const Tiles shapes;
    const std::unique_ptr<Tile[]> w(new Tile[2 * weight.groups]);
    for (int64_t block = 2 * begin; block < std::min(2 * end, blocks); block += 2) {
      const bool two = block + 1 < blocks;
      expand(block, w.get());
      if (two) expand(block + 1, w.get() + weight.groups);
      written();
      for (int64_t t = 0; t < tiles; t += 2) {
        const bool tall = t + 1 < tiles;
        if (two)
          tall ? product<2, 2>(t, block, w.get()) : product<1, 2>(t, block, w.get());
        else
          tall ? product<2, 1>(t, block, w.get()) : product<1, 1>(t, block, w.get());
      }
    }
  }

 private:
  // Expands a block into a tile for each group: W[o][k] is element k % 2 of row k / 2, column o.
  void expand(int64_t block, Tile* to) const {
    const uint8_t* code = weight.code(block);
    const BFloat16* scale = weight.scale(block);
    const ByteTable table = weight.table();
    for (int64_t g = 0; g < weight.groups; g++, to++, code += weight.bytes, scale += kLanes) {
      weight.fetch(code);
      // With 128 + level in its second byte, the float 2¹⁵ becomes 2¹⁵ + 128 + level. A fused
      // multiply-subtract removes the excess, exactly: the product has 9 bits times 8.
      const F32x16 by = widen(scale), offset = by * (32768.0f + 128.0f);
      const auto level = [&](__m512i shifted) {
        constexpr int masked_or = 0xea;  // (a & b) | c
        const __m512i number = _mm512_ternarylogic_epi32(
            shifted, _mm512_set1_epi32(0xff00), _mm512_set1_epi32(0x47000000), masked_or);
        return _mm512_fmsub_ps((__m512)number, (__m512)by, (__m512)offset);
      };
      for (int s = 0; s < kSteps; s++) {
        const __m512i four = (__m512i)weight.step(code, s, table);
        pairs(to->numbers[2 * s], level(_mm512_slli_epi32(four, 8)), level(four));
        pairs(to->numbers[2 * s + 1], level(_mm512_srli_epi32(four, 8)),
              level(_mm512_srli_epi32(four, 16)));
      }
    }
  }

  // Stores a row of a tile: two adjacent elements of each lane.
  static void pairs(BFloat16* to, __m512 even, __m512 odd) {
    _mm512_store_si512(to, woven(round((F32x16)even, (F32x16)odd)));
  }

  // Multiplies M tiles of x by N blocks, at most two of each.
  template <int M, int N>
  void product(int64_t t, int64_t block, const Tile* w) const {
    const int64_t one = weight.groups;
    const Tile* from = a.get() + t * one;
    _tile_zero(0);
    if constexpr (N > 1) _tile_zero(1);
    if constexpr (M > 1) _tile_zero(2);
    if constexpr (M > 1 && N > 1) _tile_zero(3);
    for (int64_t g = 0; g < weight.groups; g++, from++, w++) {
      _tile_loadd(4, from, 64);
      _tile_loadd(6, w, 64);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (N > 1) {
        _tile_loadd(7, w + one, 64);
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (M > 1) {
        _tile_loadd(5, from + one, 64);
        _tile_dpbf16ps(2, 5, 6);
      }
      if constexpr (M > 1 && N > 1) _tile_dpbf16ps(3, 5, 7);
    }
    alignas(64) float c[4][kTile][kTile];
    _tile_stored(0, c[0], 64);
    if constexpr (N > 1) _tile_stored(1, c[1], 64);
    if constexpr (M > 1) _tile_stored(2, c[2], 64);
    if constexpr (M > 1 && N > 1) _tile_stored(3, c[3], 64);
    for (int m = 0; m < M; m++)
      for (int n = 0; n < N; n++) finish(c[2 * m + n], t + m, block + n);
  }

  // Stores a tile of sums, with the bias added, in 16 rows of y.
  void finish(const float (&c)[kTile][kTile], int64_t t, int64_t block) const {
    const int64_t o = block * kLanes;
    const F32x16 add = bias ? read_first(bias + o, out - o) : F32x16{};
    for (int64_t r = t * kTile; r < std::min((t + 1) * kTile, rows); r++)
      write_first(y + r * out + o, load<F32x16>(c[r - t * kTile]) + add, out - o);
  }
};

#endif  // __AMX_BF16__

}  // namespace workhorse::packed_linear

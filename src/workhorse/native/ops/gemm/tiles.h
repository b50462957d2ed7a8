// C = A B for matrices larger than a cache, of bfloat16 or split float32 (simd/bf16_split.h), accumulated
// in float32 on the matrix unit.
//
// The unit multiplies two tiles of A by two tiles of B in 64 cycles. To keep it busy:
//
//   registers  four accumulator tiles; each of the four operand tiles is used twice
//   L1 cache   a panel of A, 32 rows, reused for every panel of B; if its rows are contiguous along k,
//              its tiles are loaded in place and need no packing
//   L2 cache   a packed block of B, reused for every panel of A, and, if k is too long for one block,
//              partial sums
//
// (the layers of 10.1145/1356052.1356053). The rounding of an element depends only on the length of k. The epilogue of one tile, which accumulates, rounds and stores
// its sums, overlaps with the computation of the next tile (ops/gemm/tile_sums.h).
#pragma once

#include "ops/gemm/tile_operands.h"
#include "ops/gemm/tile_sums.h"
#include "ops/scratch.h"

namespace workhorse::gemm_tiles {

#ifdef __AMX_BF16__

constexpr int64_t kBlock = 3 << 18;     // bytes of a block of B
constexpr int64_t kTotals = 1 << 18;    // partial sums kept between parts of k

template <class T>
struct Product {
  Operand<T> a, b;
  Result<T> c;
  int64_t k;

  // Computes rows [m, m_end) and columns [n, n_end), on one thread.
  void run(int64_t m, int64_t m_end, int64_t n, int64_t n_end) const {
    thread_local ScratchBuffer buffer;
    const int64_t columns = n_end - n, rows = m_end - m;
    constexpr int64_t most = kBlock / sizeof(T);
    const int64_t deep = tile_part(k, kParts<T>);
    const bool whole = deep >= k;
    const int64_t wide = even_part(columns, std::max<int64_t>(kPanel, most / deep / kPanel * kPanel), kPanel);
    const int64_t high = whole ? rows : even_part(rows, kTotals / wide / kPanel * kPanel, kPanel);
    const int64_t left = kPanel * deep, right = wide * deep, totals = whole ? 0 : high * wide;
    char* const scratch = buffer.at_least((left + right) * sizeof(T) + totals * sizeof(float));
    const Tiles tiles;
    Pass pass{*this, scratch, scratch + left * sizeof(T),
              (float*)(scratch + (left + right) * sizeof(T))};
    for (int64_t j = n; j < n_end; j += wide)
      for (int64_t i = m; i < m_end; i += high)
        for (int64_t l = 0; l < k; l += deep)
          pass.block(i, std::min(high, m_end - i), j, std::min(wide, n_end - j), l,
                     std::min(deep, k - l));
    pass.finish();
  }

 private:
  // One thread's computation.
  struct Pass {
    const Product& product;
    char *left, *right;  // packed: a panel of A, unless it is loaded in place; a block of B
    float* totals;
    Sums<T> sums[2] = {};  // one is finished while the next is computed
    int current = 0;

    // Multiplies `rows` rows of A by a block of B.
    void block(int64_t i, int64_t rows, int64_t j, int64_t columns, int64_t k, int64_t depth) {
      const int64_t steps = (depth + kDepth - 1) / kDepth;
      const Operand<T>& a = product.a;
      product.b.template pack<Side::right>(j, columns, k, depth, right);
      float* total = totals;
      for (int64_t r = 0; r < rows; r += kPanel) {
        const int64_t height = std::min<int64_t>(kPanel, rows - r);
        const bool ready = a.ready(height, depth);
        if (!ready) a.template pack<Side::left>(i + r, height, k, depth, left);
        written();
        const char* from = ready ? (const char*)a.number(i + r, k) : left;
        for (int64_t c = 0; c < columns; c += kPanel, total += kSums) {
          const char* with = right + c / kPanel * steps * kStepBytes<T>;
          if constexpr (kParts<T> == 2)
            multiply_split(from, with, steps);
          else if (ready)
            multiply(from, a.stride * 2, kTile * a.stride * 2, kDepth * 2, with, steps);
          else
            multiply(from, 64, kTileBytes, 2 * kTileBytes, with, steps);
          keep(i + r, height, j + c, std::min<int64_t>(kPanel, columns - c), k, depth, total);
        }
      }
    }

    void finish() { sums[current ^ 1].finish(kPanel); }

   private:
    static void clear() {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }

    // Multiplies a panel of A by a panel of B. Distances within A are in bytes: `stride` from one row of
    // a tile to the next, `second` to the second tile, `next` to the next step. Panels of B are streamed
    // from the L2 cache, so that they do not evict A from the L1 cache.
    void multiply(const char* a, int64_t stride, int64_t second, int64_t next, const char* b,
                  int64_t steps) {
      Sums<T>& before = sums[current ^ 1];
      const int64_t rows = (kPanel + steps - 1) / steps;
      clear();
      for (int64_t s = 0; s < steps; s++, a += next, b += 2 * kTileBytes) {
        _tile_loadd(4, a, stride);
        _tile_stream_loadd(6, b, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_stream_loadd(7, b + kTileBytes, 64);
        _tile_dpbf16ps(1, 4, 7);
        before.finish(rows);
        _tile_loadd(5, a + second, stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      before.finish(kPanel);
    }

    // The same for split elements: three products for each pair of tiles.
    void multiply_split(const char* a, const char* b, int64_t steps) {
      Sums<T>& before = sums[current ^ 1];
      const int64_t rows = (kPanel + steps - 1) / steps;
      clear();
      const auto add = [] {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      };
      for (int64_t s = 0; s < steps; s++, a += 4 * kTileBytes, b += 4 * kTileBytes) {
        _tile_stream_loadd(6, b, 64);
        _tile_stream_loadd(7, b + kTileBytes, 64);
        _tile_loadd(4, a + 2 * kTileBytes, 64);
        _tile_loadd(5, a + 3 * kTileBytes, 64);
        add();
        before.finish(rows);
        _tile_loadd(4, a, 64);
        _tile_loadd(5, a + kTileBytes, 64);
        add();
        _tile_stream_loadd(6, b + 2 * kTileBytes, 64);
        _tile_stream_loadd(7, b + 3 * kTileBytes, 64);
        add();
      }
      before.finish(kPanel);
    }

    void keep(int64_t i, int64_t rows, int64_t j, int64_t columns, int64_t k, int64_t depth,
              float* total) {
      const bool first = k == 0, last = k + depth == product.k;
      if (first && !last) return Sums<T>::store(total);
      Sums<T>& now = sums[current];
      now.take(first ? nullptr : total);
      if (last)
        now.goes_to(product.c, i, j, rows, columns);
      else
        now.goes_to_totals();
      current ^= 1;
    }
  };
};

#endif  // __AMX_BF16__

}  // namespace workhorse::gemm_tiles

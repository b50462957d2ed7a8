// C = A B for matrices of bfloat16 that do not fit a cache, summed in float32 on the matrix unit.
//
// The unit multiplies two tiles of the left side by two of the right in 64 cycles. To keep it busy:
//
//   registers  four tiles of sums; each of the four operand tiles is used twice
//   1st cache  a panel of A, 32 rows, used again for every panel of B; where rows lie along k its tiles
//              are loaded from where they are, so that it costs nothing but the first reading
//   2nd cache  a block of B in the unit's order, used again for every panel of A, and, where k is too
//              long for one block, the sums so far
//
// (the layers of 10.1145/1356052.1356053). Finished sums are added up, rounded and written while the
// unit is at the next ones.
#pragma once

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <cstdlib>
#include <new>

#include "operands.h"
#include "transpose.h"

namespace workhorse {

#ifdef __AMX_BF16__

constexpr int64_t kWhole = 1536;        // k up to here is not cut
constexpr int64_t kCut = 512;           // k of a piece otherwise
constexpr int64_t kBlock = 3 << 17;     // numbers of a block of B
constexpr int64_t kTotals = 1 << 18;    // sums kept between pieces of k
constexpr int64_t kSums = kPanel * kPanel;

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// In as many equal parts as it takes for none to be larger than `most`, which are multiples of `step`.
inline int64_t part(int64_t n, int64_t most, int64_t step) {
  const int64_t parts = (n + most - 1) / most;
  return round_up((n + parts - 1) / parts, step);
}

// Memory of a thread that is kept for its next product, in large pages if the system has them.
class Room {
 public:
  char* of(size_t bytes) {
    constexpr size_t page = 1 << 21;
    if (bytes > size_) {
      std::free(at_);
      size_ = round_up(bytes, page);
      at_ = static_cast<char*>(std::aligned_alloc(page, size_));
      if (!at_) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
      madvise(at_, size_, MADV_HUGEPAGE);
#endif
    }
    return at_;
  }
  ~Room() { std::free(at_); }

 private:
  char* at_ = nullptr;
  size_t size_ = 0;
};

// Where results go: the number of row i and column j is at[i * stride + j], or, turned,
// at[j * stride + i]. One bias, or none, belongs to each column, or, turned, to each row.
struct Result {
  BFloat16* at;
  int64_t stride;
  const BFloat16* bias;  // may be null
  bool turned;
};

inline __mmask32 first_of_32(int64_t count) { return count < 32 ? (1u << count) - 1 : ~0u; }

// 32 × 32 sums on their way from the unit to memory, a few at a time.
class Sums {
 public:
  // Take them from the unit; `totals` are to be added, or null.
  void take(float* totals) {
    store(&sums_[0][0][0]);
    totals_ = totals;
    at_ = 0;
  }

  static void store(float* to) {
    _tile_stored(0, to, 64);
    _tile_stored(1, to + 256, 64);
    _tile_stored(2, to + 512, 64);
    _tile_stored(3, to + 768, 64);
    written();
  }

  // They go to row `i` and column `j` of a result, `rows` × `columns` of them ...
  void goes_to(const Result& result, int64_t i, int64_t j, int64_t rows, int64_t columns) {
    const int64_t along = result.turned ? rows : columns;
    to_ = result.at + (result.turned ? j * result.stride + i : i * result.stride + j);
    stride_ = result.stride;
    turned_ = result.turned;
    count_ = result.turned ? columns : rows;
    mask_ = first_of_32(along);
    bias_[0] = bias_[1] = F32x16{};
    if (result.bias) {
      const BFloat16* bias = result.bias + (turned_ ? i : j);
      const __m512i both = _mm512_maskz_loadu_epi16(mask_, bias);
      bias_[0] = widen((U16x16)_mm512_castsi512_si256(both));
      bias_[1] = widen((U16x16)_mm512_extracti64x4_epi64(both, 1));
    }
  }

  // ... or are added to the totals.
  void goes_to_totals() {
    to_ = nullptr;
    turned_ = false;
    count_ = kPanel;
  }

  // Finish the next `rows` rows, if there are any left.
  void finish(int64_t rows) {
    const int64_t end = std::min(at_ + rows, count_);
    if (at_ >= end) return;
    if (!to_)
      add_to_totals(end);
    else if (turned_)
      for (int64_t r = at_; r < end; r++) {
        if (r % kTile == 0) turn(r / kTile);
        write(r, column(r, 0), column(r, 1));
      }
    else if (totals_)
      for (int64_t r = at_; r < end; r++)
        write(r, sum(r, 0) + total(r, 0), sum(r, 1) + total(r, 1));
    else
      for (int64_t r = at_; r < end; r++) write(r, sum(r, 0), sum(r, 1));
    at_ = end;
  }

 private:
  // Of the left or right half of a row.
  static int64_t place(int64_t row, int half) { return (row / 16 * 32 + half * 16 + row % 16) * 16; }
  F32x16 sum(int64_t row, int half) const { return load<F32x16>(&sums_[0][0][0] + place(row, half)); }
  F32x16 total(int64_t row, int half) const { return load<F32x16>(totals_ + place(row, half)); }

  // Of the upper or lower half of a column that was turned.
  F32x16 column(int64_t i, int half) const {
    return load<F32x16>(sums_[2 * half + i / 16][i % 16]);
  }

  void write(int64_t row, F32x16 low, F32x16 high) const {
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)(high + bias_[1]), (__m512)(low + bias_[0]));
    _mm512_mask_storeu_epi16(to_ + row * stride_, mask_, (__m512i)both);
  }

  void add_to_totals(int64_t end) const {
    for (int64_t r = at_; r < end; r++)
      for (int h = 0; h < 2; h++) {
        const F32x16 v = total(r, h) + sum(r, h);
        std::memcpy(totals_ + place(r, h), &v, sizeof v);
      }
  }

  // Rows and columns of the tiles in a column exchanged, totals added.
  void turn(int64_t column) {
    for (int64_t t = column; t < 4; t += 2) {
      __m512i v[16];
      for (int r = 0; r < 16; r++) {
        v[r] = _mm512_load_si512(sums_[t][r]);
        if (totals_) v[r] = (__m512i)((F32x16)v[r] + load<F32x16>(totals_ + (t * 16 + r) * 16));
      }
      transpose(v);
      for (int r = 0; r < 16; r++) _mm512_store_si512(sums_[t][r], v[r]);
    }
  }

  alignas(64) float sums_[4][16][16];
  float* totals_ = nullptr;
  F32x16 bias_[2];
  BFloat16* to_ = nullptr;
  int64_t stride_ = 0, count_ = 0, at_ = 0;
  __mmask32 mask_ = 0;
  bool turned_ = false;
};

struct Product {
  Operand a, b;
  Result c;
  int64_t k;

  // Rows `m` to `m_end` and columns `n` to `n_end`, by one thread.
  void run(int64_t m, int64_t m_end, int64_t n, int64_t n_end) const {
    thread_local Room room;
    const int64_t columns = n_end - n, rows = m_end - m;
    const bool whole = k <= kWhole || k * columns <= kBlock;
    const int64_t deep = whole ? round_up(k, kDepth) : part(k, kCut, kDepth);
    const int64_t wide = part(columns, std::max<int64_t>(kPanel, kBlock / deep / kPanel * kPanel), kPanel);
    const int64_t high = whole ? rows : part(rows, kTotals / wide / kPanel * kPanel, kPanel);
    const int64_t left = kPanel * deep, right = wide * deep, totals = whole ? 0 : high * wide;
    char* const scratch = room.of((left + right) * sizeof(BFloat16) + totals * sizeof(float));
    const Tiles tiles;
    Pass pass{*this, scratch, scratch + left * 2, (float*)(scratch + (left + right) * 2)};
    for (int64_t j = n; j < n_end; j += wide)
      for (int64_t i = m; i < m_end; i += high)
        for (int64_t l = 0; l < k; l += deep)
          pass.block(i, std::min(high, m_end - i), j, std::min(wide, n_end - j), l,
                     std::min(deep, k - l));
    pass.finish();
  }

 private:
  // The work of a thread.
  struct Pass {
    const Product& product;
    char *left, *right;  // a panel of A where it cannot stay, a block of B
    float* totals;
    Sums sums[2] = {};  // one being finished while the other is computed
    int turn = 0;

    // A block of B times as many rows of A.
    void block(int64_t i, int64_t rows, int64_t j, int64_t columns, int64_t k, int64_t depth) {
      const int64_t steps = (depth + kDepth - 1) / kDepth;
      const Operand& a = product.a;
      product.b.template pack<Side::right>(j, columns, k, depth, right);
      float* total = totals;
      for (int64_t r = 0; r < rows; r += kPanel) {
        const int64_t height = std::min<int64_t>(kPanel, rows - r);
        const bool ready = a.ready(height, depth);
        if (!ready) a.template pack<Side::left>(i + r, height, k, depth, left);
        written();
        const char* from = ready ? (const char*)a.number(i + r, k) : left;
        for (int64_t c = 0; c < columns; c += kPanel, total += kSums) {
          const char* with = right + c * steps * kDepth * sizeof(BFloat16);
          if (ready)
            multiply(from, a.stride * 2, kTile * a.stride * 2, kDepth * 2, with, steps);
          else
            multiply(from, 64, kTileBytes, 2 * kTileBytes, with, steps);
          keep(i + r, height, j + c, std::min<int64_t>(kPanel, columns - c), k, depth, total);
        }
      }
    }

    void finish() { sums[turn ^ 1].finish(kPanel); }

   private:
    // A panel of A times one of B, a row of a tile of A being `stride` bytes from the next, its second
    // tile `second` and the next step `next` bytes further. Panels of B come from the second cache and
    // should not push A out of the first.
    void multiply(const char* a, int64_t stride, int64_t second, int64_t next, const char* b,
                  int64_t steps) {
      Sums& before = sums[turn ^ 1];
      const int64_t rows = (kPanel + steps - 1) / steps;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
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

    void keep(int64_t i, int64_t rows, int64_t j, int64_t columns, int64_t k, int64_t depth,
              float* total) {
      const bool first = k == 0, last = k + depth == product.k;
      if (first && !last) return Sums::store(total);
      Sums& now = sums[turn];
      now.take(first ? nullptr : total);
      if (last)
        now.goes_to(product.c, i, j, rows, columns);
      else
        now.goes_to_totals();
      turn ^= 1;
    }
  };
};

#endif  // __AMX_BF16__

}  // namespace workhorse

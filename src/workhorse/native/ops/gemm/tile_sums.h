// The epilogue of a gemm. It adds partial sums and a bias to the sums of the matrix unit, transposes tiles
// if needed, and rounds and stores results, a few rows at a time while the unit computes the
// next sums.
#pragma once

#include "ops/gemm/tile_operands.h"
#include "simd/transpose.h"

namespace workhorse::gemm_tiles {

#ifdef __AMX_BF16__

constexpr int64_t kSums = kPanel * kPanel;

// Destination of results: row i, column j is stored at at[i * stride + j] or, if transposed, at
// at[j * stride + i]. A bias belongs to each column or, if transposed, to each row.
template <class T>
struct Result {
  T* at;
  int64_t stride;
  const T* bias;  // may be null
  bool transposed;
};

// The first `count` of 32 elements; the others are 0.
inline void load_first(const BFloat16* from, int64_t count, F32x16& low, F32x16& high) {
  const __m512i both = _mm512_maskz_loadu_epi16(first_of_32(count), from);
  low = widen((U16x16)_mm512_castsi512_si256(both));
  high = widen((U16x16)_mm512_extracti64x4_epi64(both, 1));
}

inline void load_first(const float* from, int64_t count, F32x16& low, F32x16& high) {
  low = (F32x16)_mm512_maskz_loadu_ps(first_of_32(count), from);
  high = (F32x16)_mm512_maskz_loadu_ps(first_of_32(count) >> 16, from + 16);
}

inline void store_first(BFloat16* to, __mmask32 mask, F32x16 low, F32x16 high) {
  _mm512_mask_storeu_epi16(to, mask, round(low, high));
}

inline void store_first(float* to, __mmask32 mask, F32x16 low, F32x16 high) {
  _mm512_mask_storeu_ps(to, mask, (__m512)low);
  _mm512_mask_storeu_ps(to + 16, mask >> 16, (__m512)high);
}

// 32 × 32 sums on their way from the unit to memory, a few rows at a time.
template <class T>
class Sums {
 public:
  // Copies the sums from the unit. `totals` are the partial sums to add, or null.
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

  // Their destination is row `i`, column `j` of a result, `rows` × `columns` of them ...
  void goes_to(const Result<T>& result, int64_t i, int64_t j, int64_t rows, int64_t columns) {
    const int64_t along = result.transposed ? rows : columns;
    to_ = result.at + (result.transposed ? j * result.stride + i : i * result.stride + j);
    stride_ = result.stride;
    transposed_ = result.transposed;
    count_ = result.transposed ? columns : rows;
    mask_ = first_of_32(along);
    bias_[0] = bias_[1] = F32x16{};
    if (result.bias) load_first(result.bias + (transposed_ ? i : j), along, bias_[0], bias_[1]);
  }

  // ... or the partial sums, to which they are added.
  void goes_to_totals() {
    to_ = nullptr;
    transposed_ = false;
    count_ = kPanel;
  }

  // Finishes the next `rows` rows, if any are left.
  void finish(int64_t rows) {
    const int64_t end = std::min(at_ + rows, count_);
    if (at_ >= end) return;
    if (!to_)
      add_to_totals(end);
    else if (transposed_)
      for (int64_t r = at_; r < end; r++) {
        if (r % kTile == 0) transpose_tiles(r / kTile);
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
  // The offset of the left or right half of a row.
  static int64_t offset(int64_t row, int half) { return (row / 16 * 32 + half * 16 + row % 16) * 16; }
  F32x16 sum(int64_t row, int half) const { return load<F32x16>(&sums_[0][0][0] + offset(row, half)); }
  F32x16 total(int64_t row, int half) const { return load<F32x16>(totals_ + offset(row, half)); }

  // The upper or lower half of a transposed column.
  F32x16 column(int64_t i, int half) const {
    return load<F32x16>(sums_[2 * half + i / 16][i % 16]);
  }

  void write(int64_t row, F32x16 low, F32x16 high) const {
    store_first(to_ + row * stride_, mask_, low + bias_[0], high + bias_[1]);
  }

  void add_to_totals(int64_t end) const {
    for (int64_t r = at_; r < end; r++)
      for (int h = 0; h < 2; h++) {
        const F32x16 v = total(r, h) + sum(r, h);
        std::memcpy(totals_ + offset(r, h), &v, sizeof v);
      }
  }

  // Transposes the tiles of a column, partial sums added.
  void transpose_tiles(int64_t column) {
    for (int64_t t = column; t < 4; t += 2) {
      U32x16 v[16];
      for (int r = 0; r < 16; r++) {
        F32x16 sum = load<F32x16>(sums_[t][r]);
        if (totals_) sum += load<F32x16>(totals_ + (t * 16 + r) * 16);
        v[r] = as<U32x16>(sum);
      }
      transpose(v);
      for (int r = 0; r < 16; r++) workhorse::put(sums_[t][r], v[r]);
    }
  }

  alignas(64) float sums_[4][16][16];
  float* totals_ = nullptr;
  F32x16 bias_[2];
  T* to_ = nullptr;
  int64_t stride_ = 0, count_ = 0, at_ = 0;
  __mmask32 mask_ = 0;
  bool transposed_ = false;
};

#endif  // __AMX_BF16__

}  // namespace workhorse::gemm_tiles

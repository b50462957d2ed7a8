// Packs the operands of a gemm in the order of the matrix unit.
//
// A gemm sums over k. A lane is a row of the left operand or a column of the right one, and a tile, 16
// lanes × 32 k, has 16 rows of 64 bytes:
//
//   left    tile[lane][k]
//   right   tile[k / 2][lane][k % 2], pairs of k adjacent
//
// A tile of float32 is split into two tiles, the upper parts of its elements and the lower parts.
//
// In memory k runs along the rows or down the columns, so there are four ways to fill a tile:
//
//            k along the rows                       k down the columns
//   left     unchanged                              32 × 16 elements transposed
//   right    16 × 16 pairs of elements transposed    two rows interleaved
#pragma once

#include <algorithm>

#include "simd/amx.h"
#include "simd/bf16_split.h"

namespace workhorse::gemm_tiles {

#ifdef __AMX_BF16__

constexpr int kTileBytes = kTile * kDepth * sizeof(BFloat16);
constexpr int kPanel = 2 * kTile;  // lanes multiplied at once: two tiles

enum class Side { left, right };

// Number of bfloat16 elements that represent one element of type T; see bf16_split.h.
template <class T>
constexpr int kParts = sizeof(T) / sizeof(BFloat16);

template <class T>
constexpr int64_t kStepBytes = 2 * kTileBytes * kParts<T>;  // bytes of one step, 32 k, of a panel

inline __mmask32 first_of_32(int64_t count) { return count < 32 ? (1u << count) - 1 : ~0u; }

// 16 bytes of each of four rows, which are `apart` bytes apart. This does the first step of a transpose
// at no cost: the other steps stay within the quarters of a vector.
inline __m512i quarters(const char* row, int64_t apart) {
  const auto quarter = [&](int i) { return _mm_loadu_si128((const __m128i*)(row + i * apart)); };
  __m512i v = _mm512_castsi128_si512(quarter(0));
  v = _mm512_mask_broadcast_i32x4(v, 0x00f0, quarter(1));
  v = _mm512_mask_broadcast_i32x4(v, 0x0f00, quarter(2));
  return _mm512_mask_broadcast_i32x4(v, 0xf000, quarter(3));
}

inline void put(char* tile, int row, __m512i v) { _mm512_store_si512(tile + row * 64, v); }

inline void copy(const char* from, int64_t stride, char* to) {
  for (int i = 0; i < 16; i++) put(to, i, _mm512_loadu_si512(from + i * stride));
}

inline void transpose_pairs(const char* from, int64_t stride, char* to) {
  for (int c = 0; c < 4; c++) {  // columns 4c to 4c + 3 of the pairs
    __m512i v[4], t[4];
    for (int i = 0; i < 4; i++) v[i] = quarters(from + i * stride + c * 16, 4 * stride);
    for (int i = 0; i < 2; i++) {
      t[i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
      t[i + 2] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
    }
    for (int i = 0; i < 4; i += 2) {
      put(to, 4 * c + i, _mm512_unpacklo_epi64(t[i], t[i + 1]));
      put(to, 4 * c + i + 1, _mm512_unpackhi_epi64(t[i], t[i + 1]));
    }
  }
}

inline void transpose_numbers(const char* from, int64_t stride, char* to) {
  for (int c = 0; c < 2; c++) {  // columns 8c to 8c + 7
    __m512i v[8], t[8];
    for (int i = 0; i < 8; i++) v[i] = quarters(from + i * stride + c * 16, 8 * stride);
    for (int i = 0; i < 4; i++) {
      t[i] = _mm512_unpacklo_epi16(v[2 * i], v[2 * i + 1]);      // columns 0 to 3
      t[i + 4] = _mm512_unpackhi_epi16(v[2 * i], v[2 * i + 1]);  // columns 4 to 7
    }
    for (int i = 0; i < 8; i += 4)
      for (int j = 0; j < 2; j++) {
        v[i + j] = _mm512_unpacklo_epi32(t[i + 2 * j], t[i + 2 * j + 1]);
        v[i + j + 2] = _mm512_unpackhi_epi32(t[i + 2 * j], t[i + 2 * j + 1]);
      }
    for (int i = 0; i < 8; i += 2) {
      put(to, 8 * c + i, _mm512_unpacklo_epi64(v[i], v[i + 1]));
      put(to, 8 * c + i + 1, _mm512_unpackhi_epi64(v[i], v[i + 1]));
    }
  }
}

inline void weave(const char* from, int64_t stride, char* to) {
  for (int i = 0; i < 16; i++, from += 2 * stride) {
    const auto row = [&](int j) { return _mm256_loadu_si256((const __m256i*)(from + j * stride)); };
    put(to, i, woven(_mm512_inserti64x4(_mm512_castsi256_si512(row(0)), row(1), 1)));
  }
}

// An operand of a gemm in memory.
template <class T>
struct Operand {
  const T* at;
  int64_t stride;  // elements from one row to the next
  bool along;      // true if k runs along the rows

  const T* number(int64_t lane, int64_t k) const {
    return at + (along ? lane * stride + k : k * stride + lane);
  }

  // True if left tiles of this many lanes and k can be loaded in place.
  bool ready(int64_t lanes, int64_t depth) const {
    return kParts<T> == 1 && along && lanes % kPanel == 0 && depth % kDepth == 0;
  }

  // Packs panels of `lanes` lanes from `lane` on and `depth` k from `k` on, padded with zeros. A panel
  // holds its steps of 32 k in sequence. A step is two tiles; for split elements, two tiles of upper
  // parts and then two of lower parts. The operand is read in the order of memory.
  template <Side side>
  void pack(int64_t lane, int64_t lanes, int64_t k, int64_t depth, char* to) const {
    const int64_t steps = (depth + kDepth - 1) / kDepth, columns = (lanes + kTile - 1) / kTile;
    if (columns % 2)
      for (int64_t s = 0; s < steps * kParts<T>; s++)
        std::memset(to + offset(columns, 0, steps) + s * 2 * kTileBytes, 0, kTileBytes);
    const auto tile = [&](int64_t c, int64_t s) {
      const int64_t l = c * kTile, d = s * kDepth;
      fill<side>(number(lane + l, k + d), std::min<int64_t>(kTile, lanes - l),
                 std::min<int64_t>(kDepth, depth - d), to + offset(c, s, steps));
    };
    if (along)
      for (int64_t c = 0; c < columns; c++)
        for (int64_t s = 0; s < steps; s++) tile(c, s);
    else
      for (int64_t s = 0; s < steps; s++)
        for (int64_t c = 0; c < columns; c++) tile(c, s);
  }

 private:
  static int64_t offset(int64_t column, int64_t step, int64_t steps) {
    return (column / 2 * steps + step) * kStepBytes<T> + column % 2 * kTileBytes;
  }

  // Fills one tile, or two tiles for split elements.
  template <Side side>
  void fill(const T* from, int64_t lanes, int64_t depth, char* to) const {
    constexpr int64_t below = 2 * kTileBytes;
    const int64_t width = along ? kDepth : kTile;
    alignas(64) char whole[kParts<T>][kTileBytes];
    if constexpr (kParts<T> == 2) {
      const auto ready = [=](int i, __m512i upper, __m512i lower) {
        put(to, i, side == Side::left ? upper : woven(upper));
        put(to + below, i, side == Side::left ? lower : woven(lower));
      };
      if (along == (side == Side::left)) return split_tile(from, lanes, depth, ready);
      split_tile(from, lanes, depth, [&](int i, __m512i upper, __m512i lower) {
        put(whole[0], i, upper);
        put(whole[1], i, lower);
      });
      for (int p = 0; p < 2; p++) move<side>(whole[p], width * 2, to + p * below);
    } else if (lanes == kTile && depth == kDepth) {
      move<side>((const char*)from, stride * 2, to);
    } else {
      const int64_t rows = along ? lanes : depth, bytes = (along ? depth : lanes) * 2;
      std::memset(whole, 0, sizeof whole);
      for (int64_t i = 0; i < rows; i++)
        std::memcpy(whole[0] + i * width * 2, from + i * stride, bytes);
      move<side>(whole[0], width * 2, to);
    }
  }

  // Splits the elements of a tile, 32 at a time in the order of memory.
  template <class Store>
  void split_tile(const T* from, int64_t lanes, int64_t depth, const Store& store) const {
    const int64_t step = stride;
    const __mmask16 lane = first(lanes), k[] = {first(depth), first(std::max<int64_t>(0, depth - 16))};
    const auto row = [=](int i, int h) {
      return _mm512_maskz_loadu_ps(i < lanes ? k[h] : 0, from + i * step + h * 16);
    };
    const auto column = [=](int i, int h) {
      const int down = 2 * i + h;
      return _mm512_maskz_loadu_ps(down < depth ? lane : 0, from + down * step);
    };
    along ? split(row, store) : split(column, store);
  }

  // Writes a tile from bfloat16 rows that are `bytes` apart.
  template <Side side>
  void move(const char* from, int64_t bytes, char* to) const {
    if constexpr (side == Side::left)
      along ? copy(from, bytes, to) : transpose_numbers(from, bytes, to);
    else
      along ? transpose_pairs(from, bytes, to) : weave(from, bytes, to);
  }
};

#endif  // __AMX_BF16__

}  // namespace workhorse::gemm_tiles

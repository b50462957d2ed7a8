// Transpose of 16 × 16 elements of 32 bits, which turns lanes into rows.
#pragma once

#include "simd/vectors.h"

namespace workhorse {

// Exchanges the lanes of a whose index has bit W with the lanes of b whose index does not.
template <int W, class V>
inline void exchange(V& a, V& b) {
  constexpr int lanes = sizeof(V) / sizeof(uint32_t);
  if constexpr (kHalved<V> && 2 * W == lanes) {
    std::swap(a.high, b.low);
  } else if constexpr (kHalved<V>) {
    exchange<W>(a.low, b.low);
    exchange<W>(a.high, b.high);
  } else {
    [&]<int... Lane>(std::integer_sequence<int, Lane...>) {
      const V first = __builtin_shufflevector(a, b, (Lane & W ? lanes + Lane - W : Lane)...);
      b = __builtin_shufflevector(a, b, (Lane & W ? lanes + Lane : Lane + W)...);
      a = first;
    }(std::make_integer_sequence<int, lanes>());
  }
}

// Takes four rounds; each exchanges rows and columns whose indices differ in one bit.
inline void transpose(U32x16 (&v)[16]) {
  const auto round = [&]<int W>(std::integral_constant<int, W>) {
    for (int i = 0; i < 16; i++)
      if (!(i & W)) exchange<W>(v[i], v[i + W]);
  };
  round(std::integral_constant<int, 8>());
  round(std::integral_constant<int, 4>());
  round(std::integral_constant<int, 2>());
  round(std::integral_constant<int, 1>());
}

}  // namespace workhorse

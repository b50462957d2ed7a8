// The mean of a row, and the reciprocal of its standard deviation or, for RMSNorm, of its root mean square.
#pragma once

#include <cmath>
#include <cstdint>

#include "simd/elementwise.h"

namespace workhorse {

// A row's norm is (x - mean) · rstd.
struct Moments {
  float mean, rstd;
};

// Moments of `width` elements; without `centred`, as in RMSNorm, the mean is 0.
template <class T>
Moments moments(int64_t width, const T* x, float eps, bool centred) {
  float mean = 0;
  if (centred) {
    Sum total;
    each(width, [&]<class V>(V, int64_t i) { total += read<V>(x + i); });
    mean = total / width;
  }
  Sum squares;
  each(width, [&]<class V>(V, int64_t i) {
    const V deviation = read<V>(x + i) - mean;
    squares.add_product(deviation, deviation);
  });
  return {mean, 1.0f / std::sqrt(squares / width + eps)};
}

}  // namespace workhorse

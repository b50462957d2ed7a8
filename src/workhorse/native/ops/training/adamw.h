// An update of AdamW (1711.05101), in one pass over memory. Sums of products are written out as fma: left
// to the compiler, a number would be rounded differently in a vector and after the last whole one, and so
// by another process that has another part of the weight.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/training/weights.h"

namespace workhorse::adamw {

struct Update {
  float shrink, kept, first, second, step, root, eps;

  template <class Weight, class Gradient, class Mean>
  void operator()(Weight weight, Gradient gradient, Mean mean, float* mean_square, int64_t begin,
                  int64_t end) const {
    for (int64_t i = begin; i < end; ++i) {
      const float given = gradient.read(i), g = given * shrink;
      const float old = mean.read(i), old_square = mean_square[i];
      const float m = std::fma(first, std::fma(given, shrink, -old), old);
      const float s = std::fma(second, std::fma(g, g, -old_square), old_square);
      mean.write(i, m);
      mean_square[i] = s;
      const float move = step * m / std::fma(std::sqrt(s), root, eps);
      weight.write(i, std::fma(weight.read(i), kept, -move));
    }
  }
};

}  // namespace workhorse::adamw

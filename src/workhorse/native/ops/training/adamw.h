// An AdamW update (1711.05101) in one pass over memory. Sums of products are written out as fma. A compiler could
// round an element differently in a vector and after the last whole vector. Then a process with another shard of the
// weight would get other bits.
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

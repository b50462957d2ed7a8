// An update of AdamW (1711.05101), in one pass over memory.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/weights.h"

namespace workhorse::adamw {

struct Update {
  float shrink, kept, first, second, step, root, eps;

  template <class Weight, class Gradient, class Mean>
  void operator()(Weight weight, Gradient gradient, Mean mean, float* mean_square, int64_t begin,
                  int64_t end) const {
    for (int64_t i = begin; i < end; ++i) {
      const float g = gradient.read(i) * shrink;
      const float old = mean.read(i);
      const float m = old + first * (g - old);
      const float s = mean_square[i] + second * (g * g - mean_square[i]);
      mean.write(i, m);
      mean_square[i] = s;
      weight.write(i, weight.read(i) * kept - step * m / (std::sqrt(s) * root + eps));
    }
  }
};

}  // namespace workhorse::adamw

// Muon's momentum and updates of matrices, in one pass over memory each.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ops/training/weights.h"

namespace workhorse::muon {

// Adds a gradient to the momentum of one matrix, and returns the direction of its update, of norm 1.
struct Momentum {
  float shrink, kept;
  bool nesterov;

  template <class Gradient>
  void operator()(Gradient gradient, float* momentum, weights::Narrow direction, int64_t rows, int64_t columns,
                  bool transposed) const {
    const int64_t n = rows * columns;
    constexpr int64_t kLanes = 16;
    float sums[kLanes] = {};
    for (int64_t i = 0; i < n; ++i) {
      momentum[i] += (1 - kept) * (gradient.read(i) * shrink - momentum[i]);
    }
    const int64_t whole = n / kLanes * kLanes;
    for (int64_t i = 0; i < whole; i += kLanes)
      for (int64_t j = 0; j < kLanes; ++j) {
        const float u = update(gradient, momentum, i + j);
        sums[j] += u * u;
      }
    double sum = 0;
    for (float part : sums) sum += part;
    for (int64_t i = whole; i < n; ++i) {
      const float u = update(gradient, momentum, i);
      sum += u * u;
    }
    const float scale = 1 / std::max(float(std::sqrt(sum)), 1e-7f);
    if (!transposed) {
      for (int64_t i = 0; i < n; ++i) direction.write(i, update(gradient, momentum, i) * scale);
      return;
    }
    constexpr int64_t kTile = 16;  // number of rows whose column nearly fills a cache line of the result
    for (int64_t first = 0; first < rows; first += kTile)
      for (int64_t j = 0; j < columns; ++j)
        for (int64_t i = first; i < std::min(first + kTile, rows); ++i)
          direction.write(j * rows + i, update(gradient, momentum, i * columns + j) * scale);
  }

  template <class Gradient>
  float update(Gradient gradient, const float* momentum, int64_t i) const {
    if (!nesterov) return momentum[i];
    const float g = gradient.read(i) * shrink;
    return g + kept * (momentum[i] - g);
  }
};

// weight · kept - size · update for one matrix; the update may be transposed. As in adamw.h, the compiler
// cannot contract any operation.
inline void move(weights::Split weight, weights::Narrow update, int64_t rows, int64_t columns, bool transposed,
                 float kept, float size) {
  if (!transposed) {
    for (int64_t i = 0; i < rows * columns; ++i)
      weight.write(i, std::fma(weight.read(i), kept, -(size * update.read(i))));
    return;
  }
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j)
      weight.write(i * columns + j, std::fma(weight.read(i * columns + j), kept,
                                             -(size * update.read(j * rows + i))));
}

}  // namespace workhorse::muon

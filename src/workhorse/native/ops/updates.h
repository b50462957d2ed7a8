// Updates of weights that are float32, or float32 in two parts, a bfloat16 and an int16 remainder
// (optim/master_weights.py), each a pass over memory.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace workhorse {

// The loops over it vectorise.
struct SplitWeights {
  uint16_t* upper;
  int16_t* lower;

  float read(int64_t i) const {
    return std::bit_cast<float>((uint32_t(upper[i]) << 16) + uint32_t(lower[i]));
  }

  void write(int64_t i, float value) const {
    const uint32_t now = std::bit_cast<uint32_t>(value);
    const uint32_t high = (now + 0x8000) >> 16;
    upper[i] = uint16_t(high);
    lower[i] = int16_t(now - (high << 16));
  }
};

struct Narrow {  // bfloat16 in memory
  uint16_t* at;
  float read(int64_t i) const { return std::bit_cast<float>(uint32_t(at[i]) << 16); }
  void write(int64_t i, float value) const {  // to nearest, ties to even; the value is finite
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    at[i] = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
};

struct Wide {  // float32
  float* at;
  float read(int64_t i) const { return at[i]; }
  void write(int64_t i, float value) const { at[i] = value; }
};

// AdamW (1711.05101).
struct AdamW {
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

// Muon's momentum of one matrix takes in a gradient; then the direction of its update, of length 1.
struct Momentum {
  float shrink, kept;
  bool nesterov;

  template <class Gradient>
  void operator()(Gradient gradient, float* momentum, Narrow direction, int64_t rows, int64_t columns,
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
    constexpr int64_t kTile = 16;  // rows whose column is one cache line of the result, nearly
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

// weight · kept - size · update, of one matrix; the update may lie transposed.
inline void move(SplitWeights weight, Narrow update, int64_t rows, int64_t columns, bool transposed,
                 float kept, float size) {
  if (!transposed) {
    for (int64_t i = 0; i < rows * columns; ++i)
      weight.write(i, weight.read(i) * kept - size * update.read(i));
    return;
  }
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j)
      weight.write(i * columns + j,
                   weight.read(i * columns + j) * kept - size * update.read(j * rows + i));
}

}  // namespace workhorse

// y = x Wᵀ + b for few rows of x, with W as `nn.Linear` holds it: dot products of rows.
//
// It takes as long as reading W once. Four rows of W are read in parallel while the same columns of the
// next four are prefetched. Up to four rows of x are multiplied while a part of W is in registers, and
// further ones while the four rows of W are still in the cache.
#pragma once

#include <algorithm>

#include "simd/dot.h"

namespace workhorse::linear {

constexpr int kOut = 4;   // rows of W side by side
constexpr int kRows = 4;  // rows of x at a time

// What x is multiplied with, and where the product goes.
template <class T>
struct Layer {
  const T *weight, *bias;  // bias may be null
  T* y;
  int64_t out;
};

template <class T>
struct Rows {
  const T* x;
  int64_t rows, in;

  // Outputs `begin` to `end` of a layer for every row of x.
  void run(const Layer<T>& layer, int64_t begin, int64_t end) const {
    int64_t o = begin;
    for (; o + kOut <= end; o += kOut) block<kOut>(layer, o);
    for (; o < end; o++) block<1>(layer, o);
  }

 private:
  template <int O>
  void block(const Layer<T>& layer, int64_t o) const {
    int64_t r = 0;
    for (; r + kRows <= rows; r += kRows) dots<O, kRows>(layer, o, r);
    for (; r < rows; r++) dots<O, 1>(layer, o, r);
  }

  template <int O, int R>
  void dots(const Layer<T>& layer, int64_t o, int64_t r) const {
    constexpr int step = Dot<T>::step;
    const T *w = layer.weight + o * in, *xs = x + r * in;
    F32x16 acc[O][R] = {};
    int64_t k = 0;
    for (; k + step <= in; k += step)
      for (int i = 0; i < O; i++) {
        if (r == 0) expect(w + (i + O) * in + k);
        for (int j = 0; j < R; j++)
          acc[i][j] = Dot<T>::add(acc[i][j], w + i * in + k, xs + j * in + k);
      }
    for (int i = 0; i < O; i++)
      for (int j = 0; j < R; j++) {
        float total = sum(acc[i][j]) + tail(w + i * in, xs + j * in, k);
        if (layer.bias) total += to_float(layer.bias[o + i]);
        store(layer.y + (r + j) * layer.out + o + i, total);
      }
  }

  float tail(const T* w, const T* xs, int64_t k) const {
    float total = 0;
    for (; k < in; k++) total += to_float(w[k]) * to_float(xs[k]);
    return total;
  }
};

}  // namespace workhorse::linear

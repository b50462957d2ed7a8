// Norms of a training step, with one forward and one backward pass.
#pragma once

#include <cstdint>

#include "ops/moments.h"

namespace workhorse::norms {

template <class T>
void add_row(int64_t width, const T* a, const T* b, T* sum) {
  each(width, [=]<class V>(V, int64_t i) { write(sum + i, read<V>(a + i) + read<V>(b + i)); });
}

// y = (x - mean) · rstd · gain + shift for one row. LayerNorm is Centred; RMSNorm keeps the mean at 0.
// A Rounded norm rounds the rest to T before it multiplies by the gain.
template <bool Centred, bool Rounded, class T>
Moments forward(int64_t width, const T* x, const float* gain, const float* shift, float eps, T* y) {
  const Moments row = moments(width, x, eps, Centred);
  each(width, [=]<class V>(V, int64_t i) {
    V normal = (read<V>(x + i) - row.mean) * row.rstd;
    if constexpr (Rounded) normal = held_by<T>(normal);
    write(y + i, fma(normal, read<V>(gain + i), read<V>(shift + i)));
  });
  return row;
}

// The gradient of one row; the gradients of gain and shift are added to sums over rows.
template <bool Centred, class T>
void backward(int64_t width, const T* dy, const T* x, const float* gain, Moments row,
              T* dx, float* dgain, float* dshift) {
  Sum along, level;
  each(width, [&]<class V>(V, int64_t i) {
    const V normal = (read<V>(x + i) - row.mean) * row.rstd;
    const V above = read<V>(dy + i);
    const V slope = above * read<V>(gain + i);
    along.add_product(slope, normal);
    if constexpr (Centred) level += slope;
    write(dgain + i, fma(above, normal, read<V>(dgain + i)));
    write(dshift + i, read<V>(dshift + i) + above);
  });
  const float tilt = along / width, lift = level / width;
  each(width, [=]<class V>(V, int64_t i) {
    const V normal = (read<V>(x + i) - row.mean) * row.rstd;
    const V slope = read<V>(dy + i) * read<V>(gain + i);
    write(dx + i, fma(normal, -tilt, slope - lift) * row.rstd);
  });
}

}  // namespace workhorse::norms

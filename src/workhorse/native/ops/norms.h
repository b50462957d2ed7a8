// Norms of a training step, forwards and backwards in a pass each. Numbers are float or BFloat16 in memory
// and float32 in between.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd/vectors.h"

namespace workhorse {

// The code below is written once for sixteen numbers, V = F32x16, and for one, V = float.
template <class V>
constexpr int64_t kCount = sizeof(V) / sizeof(float);

template <class F>
inline void each(int64_t n, F f) {
  int64_t i = 0;
  for (; i + kCount<F32x16> <= n; i += kCount<F32x16>) f(F32x16{}, i);
  for (; i < n; i++) f(0.0f, i);
}

template <class V>
inline V read(const float* from) { return load<V>(from); }

template <class V>
inline V read(const BFloat16* from) {
  if constexpr (kCount<V> == 1) return to_float(*from);
  else return widen(from);
}

inline void write(float* to, F32x16 v) { std::memcpy(to, &v, sizeof v); }

inline void write(BFloat16* to, F32x16 v) {
  const U16x16 narrow = round(v);
  std::memcpy(to, &narrow, sizeof narrow);
}

template <class T>
inline void write(T* to, float value) { store(to, value); }

// Adds up a row: lanes apart from what is left at its end.
struct Sum {
  F32x16 lanes{};
  float rest = 0;

  void operator+=(F32x16 v) { lanes += v; }
  void operator+=(float v) { rest += v; }
  operator float() const { return sum(lanes) + rest; }
};

template <class T>
void add_row(int64_t width, const T* a, const T* b, T* sum) {
  each(width, [=]<class V>(V, int64_t i) { write(sum + i, read<V>(a + i) + read<V>(b + i)); });
}

// What a row was shifted and scaled by: (x - mean) · scale.
struct Moments {
  float mean, scale;
};

// A number as T has it.
template <class T, class V>
inline V held_by(V value) {
  if constexpr (std::is_same_v<T, float>) return value;
  T kept[kCount<V>];
  write(kept, value);
  return read<V>(kept);
}

// y = (x - mean) · scale · gain + shift for one row. LayerNorm is Centred, RMSNorm keeps the mean at 0.
// One that is Rounded multiplies by the gain what T has of the rest.
template <bool Centred, bool Rounded, class T>
Moments norm_row(int64_t width, const T* x, const float* gain, const float* shift, float eps, T* y) {
  float mean = 0;
  if constexpr (Centred) {
    Sum total;
    each(width, [&]<class V>(V, int64_t i) { total += read<V>(x + i); });
    mean = total / width;
  }
  Sum squares;
  each(width, [&]<class V>(V, int64_t i) {
    const V centred = read<V>(x + i) - mean;
    squares += centred * centred;
  });
  const float scale = 1.0f / std::sqrt(squares / width + eps);
  each(width, [=]<class V>(V, int64_t i) {
    V normal = (read<V>(x + i) - mean) * scale;
    if constexpr (Rounded) normal = held_by<T>(normal);
    write(y + i, normal * read<V>(gain + i) + read<V>(shift + i));
  });
  return {mean, scale};
}

// The gradient of one row; those of gain and shift are added to sums over rows.
template <bool Centred, class T>
void norm_row_backward(int64_t width, const T* dy, const T* x, const float* gain, Moments row,
                       T* dx, float* dgain, float* dshift) {
  Sum along, level;
  each(width, [&]<class V>(V, int64_t i) {
    const V normal = (read<V>(x + i) - row.mean) * row.scale;
    const V above = read<V>(dy + i);
    const V slope = above * read<V>(gain + i);
    along += slope * normal;
    if constexpr (Centred) level += slope;
    write(dgain + i, read<V>(dgain + i) + above * normal);
    write(dshift + i, read<V>(dshift + i) + above);
  });
  const float turn = along / width, lift = level / width;
  each(width, [=]<class V>(V, int64_t i) {
    const V normal = (read<V>(x + i) - row.mean) * row.scale;
    const V slope = read<V>(dy + i) * read<V>(gain + i);
    write(dx + i, (slope - lift - normal * turn) * row.scale);
  });
}

}  // namespace workhorse

// Loops over the elements of a row, float or BFloat16 in memory, computed in float32.
#pragma once

#include <type_traits>

#include "simd/bf16.h"

namespace workhorse {

// A loop body is written once for both element counts: sixteen, V = F32x16, and one, V = float.
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

inline void write(float* to, F32x16 v) { put(to, v); }

inline void write(BFloat16* to, F32x16 v) { put(to, round(v)); }

template <class T>
inline void write(T* to, float value) { store(to, value); }

// Loads elements that are `step` apart as one vector, and stores them.
template <class V, class T>
inline V gather(const T* from, int64_t step) {
  if (step == 1) return read<V>(from);
  T kept[kCount<V>];
  for (int64_t n = 0; n < kCount<V>; n++) kept[n] = from[n * step];
  return read<V>(kept);
}

template <class V, class T>
inline void scatter(T* to, int64_t step, V v) {
  if (step == 1) return write(to, v);
  T kept[kCount<V>];
  write(kept, v);
  for (int64_t n = 0; n < kCount<V>; n++) to[n * step] = kept[n];
}

// Sums of a row: a vector of lanes, and the elements left over at the end of the row.
struct Sum {
  F32x16 lanes{};
  float rest = 0;

  void operator+=(F32x16 v) { lanes += v; }
  void operator+=(float v) { rest += v; }
  template <class V>
  void add_product(V a, V b) {
    if constexpr (kCount<V> == 1) rest = fma(a, b, rest);
    else lanes = fma(a, b, lanes);
  }
  operator float() const { return sum(lanes) + rest; }
};

// A value rounded to T.
template <class T, class V>
inline V held_by(V value) {
  if constexpr (std::is_same_v<T, float>) return value;
  T kept[kCount<V>];
  write(kept, value);
  return read<V>(kept);
}

}  // namespace workhorse

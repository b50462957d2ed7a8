// Activations and their derivatives, with or without multiplication by another branch. A training step looks them up
// for bfloat16 and computes them for float; a decoding step computes them.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd/elementwise.h"
#include "simd/exponential.h"

namespace workhorse::activations {

template <class V>
struct Image {
  V value, slope;
};

// Table of the 65,536 bfloat16 values: the activation in the lower half of a word, its derivative in the
// upper.
struct Table {
  const uint32_t* words;

  template <class V>
  Image<V> at(const BFloat16* x) const {
    if constexpr (kCount<V> == 1) {
      return parts<V>(words[x->bits]);
    } else {
      uint32_t found[16];  // not by a gather, which is slower on AMD CPUs
      for (int i = 0; i < 16; i++) found[i] = words[x[i].bits];
      return parts<V>(load<U32x16>(found));
    }
  }

 private:
  template <class V, class Words>
  static Image<V> parts(Words found) {
    const Words low = found << 16, high = found & 0xffff0000;
    return {as<V>(low), as<V>(high)};
  }
};

// Function::of(x), of float.
template <class Function>
struct Computed {
  template <class V>
  Image<V> at(const float* x) const {
    const Image<F32x16> all = Function::of(read<V>(x) - F32x16{});
    if constexpr (kCount<V> == 1) return {all.value[0], all.slope[0]};
    else return all;
  }
};

// 1 / x for finite x >= 1; a division takes as long as the rest of an activation.
inline F32x16 inverse(F32x16 x) {
#ifdef __AVX512F__
  const F32x16 close = (F32x16)_mm512_rcp14_ps((__m512)x);
  return fma(close, fma(-x, close, 1.0f), close);
#else
  return 1.0f / x;
#endif
}

// 1 / (1 + e^-x) and its derivative, without cancellation.
inline Image<F32x16> sigmoid(F32x16 x) {
  const F32x16 power = exponential(select(x < 0.0f, x, -x)), above = inverse(1.0f + power);
  const F32x16 below = power * above;
  return {select(x < 0.0f, below, above), below * above};
}

struct Sigmoid {
  static Image<F32x16> of(F32x16 x) { return sigmoid(x); }
};

struct Silu {
  static Image<F32x16> of(F32x16 x) {
    const auto [value, slope] = sigmoid(x);
    return {x * value, fma(x, slope, value)};
  }
};

struct Relu {  // keeps NaN
  static Image<F32x16> of(F32x16 x) {
    return {select(x < 0.0f, F32x16{}, x), select(x > 0.0f, F32x16{} + 1.0f, F32x16{})};
  }
};

struct ReluSquared {
  static Image<F32x16> of(F32x16 x) {
    const F32x16 positive = Relu::of(x).value;
    return {positive * positive, positive + positive};
  }
};

// x Φ(x), where Φ is the normal distribution function. Φ(-|x|) is e^(-x²/2) times a function that a polynomial in
// t = 1 / (1 + |x| / √8) approximates with a relative error of 2^-24 for |x| < 13.
struct Gelu {
  static Image<F32x16> of(F32x16 x) {
    const F32x16 t = inverse(fma(select(x < 0.0f, -x, x), 0.353553391f, 1.0f));
    const F32x16 power = exponential(x * x * -0.5f);
    F32x16 sum = fma(t, kFactors[8], kFactors[7]);
    for (int i = 6; i >= 0; i--) sum = fma(sum, t, kFactors[i]);
    const F32x16 small = sum * t * power, normal = select(x < 0.0f, small, 1.0f - small);
    return {x * normal, fma(x * power, 0.398942280f, normal)};
  }

 private:
  static constexpr float kFactors[] = {0.141043996f, 0.141174019f, 0.121650023f, 0.10095865f, -0.0124104966f,
                                       0.137732528f, -0.242469347f, 0.141744246f, -0.0294236387f};
};

// x · sigmoid(2u), u = √(2/π) (x + 0.044715 x³), which is x (1 + tanh u) / 2.
struct GeluTanh {
  static Image<F32x16> of(F32x16 x) {
    constexpr float kLinear = 1.595769122f, kCubic = 0.044715f;
    const F32x16 square = x * x;
    const auto [value, slope] = sigmoid(x * fma(square, kLinear * kCubic, kLinear));
    return {x * value, fma(x * slope, fma(square, 3 * kLinear * kCubic, kLinear), value)};
  }
};

// y = act(x), or act(x) · up if Gated.
template <bool Gated, class Activation, class T>
void forward(int64_t n, Activation act, const T* x, const T* up, T* y) {
  each(n, [=]<class V>(V, int64_t i) {
    const V value = act.template at<V>(x + i).value;
    if constexpr (Gated) write(y + i, value * read<V>(up + i));
    else write(y + i, value);
  });
}

// y again, the gradient of x and, if Gated, the gradient of up.
template <bool Gated, class Activation, class T>
void backward(int64_t n, Activation act, const T* dy, const T* x, const T* up, T* y, T* dx,
              T* dup) {
  each(n, [=]<class V>(V, int64_t i) {
    const auto [value, slope] = act.template at<V>(x + i);
    const V above = read<V>(dy + i);
    if constexpr (Gated) {
      const V other = read<V>(up + i);
      write(dx + i, above * slope * other);
      write(dup + i, above * value);
      write(y + i, value * other);
    } else {
      write(dx + i, above * slope);
      write(y + i, value);
    }
  });
}

}  // namespace workhorse::activations

// e^x and tanh x for vectors, on any CPU.
#pragma once

#include "simd/vectors.h"

namespace workhorse {

// e^x for x <= 0, to a few units in the last place: 2^whole · e^rest with |rest| <= ln(2) / 2. It is 0 below e^-87, the
// smallest result that is not denormal. NaN stays NaN.
inline F32x16 exponential(F32x16 x) {
  const auto none = x < F32x16{} - 87.0f;
  x = select(none, F32x16{}, x);
  const I32x16 whole = convert<I32x16>(fma(x, 1.44269504f, -0.5f));
  const F32x16 w = convert<F32x16>(whole);
  const F32x16 rest = fma(w, 2.12194440e-4f, fma(w, -0.693359375f, x));
  F32x16 power = fma(rest, 1.0f / 5040, 1.0f / 720);
  for (float factor : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    power = fma(power, rest, factor);
  return select(none, F32x16{}, power * (F32x16)((whole + 127) << 23));
}

// tanh x, to a few units in the last place; a polynomial near 0, as (1 - e^-2x) / (1 + e^-2x) cancels there.
inline F32x16 hyperbolic_tangent(F32x16 x) {
  const F32x16 size = select(x < 0.0f, -x, x), square = x * x, power = exponential(size * -2.0f);
  const F32x16 far = (1.0f - power) / (1.0f + power);
  F32x16 near = fma(square, -5.70498872745e-3f, 2.06390887954e-2f);
  for (float factor : {-5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f}) near = fma(near, square, factor);
  return select(size < 0.625f, fma(x * square, near, x), select(x < 0.0f, -far, far));
}

}  // namespace workhorse

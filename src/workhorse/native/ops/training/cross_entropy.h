// Next-token cross-entropy with its gradient, a row of logits at a time.
#pragma once

#include <cmath>
#include <cstdint>

#include "simd/elementwise.h"
#include "simd/exponential.h"

namespace workhorse::cross_entropy {

// What a row adds to the loss, in nats.
struct Losses {
  float cross_entropy, z_loss;
};

// The losses of a row, `log(sum(e^z)) - z[target]` and `z_loss` times the square of the former term,
// where z is `multiplier` times the logits. These become the gradient of both together. The row is read
// three times and stays in the cache meanwhile.
template <class T>
Losses loss_into_gradient(int64_t vocab, T* logits, int64_t target, float multiplier, float z_loss) {
  F32x16 peaks = F32x16{} - INFINITY;
  float largest = -INFINITY;
  const auto raise = [](auto& peak, auto other) { peak = select(other > peak, other, peak); };
  each(vocab, [&]<class V>(V, int64_t i) {
    if constexpr (kCount<V> == 1) raise(largest, read<V>(logits + i) * multiplier);
    else raise(peaks, read<V>(logits + i) * multiplier);
  });
  for (int64_t lane = 0; lane < kCount<F32x16>; lane++) raise(largest, peaks[lane]);
  const auto power = [=]<class V>(V logit) {
    if constexpr (kCount<V> == 1) return exponential(logit * multiplier - largest - F32x16{})[0];
    else return exponential(logit * multiplier - largest);
  };
  Sum total;
  each(vocab, [&]<class V>(V, int64_t i) { total += power(read<V>(logits + i)); });
  const float normaliser = std::log(total) + largest;
  const float chosen = to_float(logits[target]);
  const float factor = multiplier * (1 + 2 * z_loss * normaliser) / total;
  each(vocab, [=]<class V>(V, int64_t i) { write(logits + i, power(read<V>(logits + i)) * factor); });
  store(logits + target, power(chosen) * factor - multiplier);
  return {normaliser - chosen * multiplier, z_loss * normaliser * normaliser};
}

}  // namespace workhorse::cross_entropy

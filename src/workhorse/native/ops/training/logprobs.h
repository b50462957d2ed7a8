// Log-probabilities of targets, and the gradient of a weighted sum of them, one row of logits at a time.
#pragma once

#include <cmath>
#include <cstdint>

#include "simd/elementwise.h"
#include "simd/exponential.h"

namespace workhorse::logprobs {

// Results of a row in nats: the log-probability of the target, the log of the sum of exponentials, and the
// entropy.
struct Terms {
  float target, logsumexp, entropy;
};

// Coefficients by which a loss multiplies the terms.
struct Coefficients {
  float target, logsumexp, square, entropy;  // the third is the coefficient of the square of logsumexp
};

// Terms of z = `multiplier` times the logits. With coefficients, the logits become the gradient of the loss. The row
// is read three times and stays in the cache meanwhile. Without kEntropy the entropy is 0.
template <bool kEntropy, class T>
Terms score(int64_t vocab, T* logits, int64_t target, float multiplier, const Coefficients* by) {
  constexpr float kFar = -1e4f;  // finite, because -inf times a probability of 0 would be NaN
  F32x16 peaks = F32x16{} - INFINITY;
  float largest = -INFINITY;
  const auto raise = [](auto& peak, auto other) { peak = select(other > peak, other, peak); };
  each(vocab, [&]<class V>(V, int64_t i) {
    if constexpr (kCount<V> == 1) raise(largest, read<V>(logits + i) * multiplier);
    else raise(peaks, read<V>(logits + i) * multiplier);
  });
  for (int64_t lane = 0; lane < kCount<F32x16>; lane++) raise(largest, peaks[lane]);
  const auto below = [=]<class V>(V logit) { return logit * multiplier - largest; };
  const auto power = [=]<class V>(V logit) {
    if constexpr (kCount<V> == 1) return exponential(below(logit) - F32x16{})[0];
    else return exponential(below(logit));
  };
  const auto kept = [=]<class V>(V x) { return select(x < V{} + kFar, V{} + kFar, x); };
  Sum total, spread;
  each(vocab, [&]<class V>(V, int64_t i) {
    const V logit = read<V>(logits + i), p = power(logit);
    total += p;
    if constexpr (kEntropy) spread += p * kept(below(logit));
  });
  const float log_total = std::log(total), logsumexp = log_total + largest;
  const float entropy = kEntropy ? log_total - spread / total : 0;
  const float chosen = to_float(logits[target]);
  const Terms terms = {chosen * multiplier - logsumexp, logsumexp, entropy};
  if (by == nullptr) return terms;
  const float factor = multiplier * (by->logsumexp + 2 * by->square * logsumexp - by->target) / total;
  const float away = multiplier * by->entropy / total, mean = log_total - entropy;
  const auto slope = [=]<class V>(V logit) {
    if constexpr (kEntropy) return power(logit) * (V{} + factor - (kept(below(logit)) - mean) * away);
    else return power(logit) * factor;
  };
  each(vocab, [=]<class V>(V, int64_t i) { write(logits + i, slope(read<V>(logits + i))); });
  store(logits + target, slope(chosen) + multiplier * by->target);
  return terms;
}

}  // namespace workhorse::logprobs

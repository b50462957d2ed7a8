// The choice of experts for each token of a mixture, and their order.
//
// The pairs of a token and one of its experts are sorted by expert, so that the rows of an expert are consecutive. A
// pair's place has no influence on its results.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "ops/activations.h"
#include "simd/elementwise.h"

namespace workhorse::experts {

struct Choice {
  int32_t expert;
  float weight;
  int32_t place;  // of this pair, among all pairs sorted by expert
};

// Flags of a router.
constexpr int64_t kSigmoid = 1, kNormalised = 2, kRanksScores = 4, kTopTwo = 8, kSparse = 16;

struct Router {
  int64_t top_k, flags, groups, best_groups;
  float scale, jitter;
};

// Chooses the experts of a token from its logits, which are overwritten. `bias` is added to what experts are ranked by;
// it may be null.
class Chooser {
 public:
  Chooser(float* logits, int64_t count, const float* bias, const Router& router)
      : logits_(logits), count_(count), bias_(bias), router_(router), ranks_(logits, logits + count) {}

  void run(Choice* to) {
    if (router_.flags & kSparse) return mix_sparsely(to);
    score();
    rank();
    float total = 0;
    for (int64_t k = 0; k < router_.top_k; k++) {
      const int64_t best = take_best();
      to[k] = {int32_t(best), logits_[best], 0};
      total += to[k].weight;
    }
    total = std::max(total, std::numeric_limits<float>::min());
    for (int64_t k = 0; k < router_.top_k; k++) {
      if (router_.flags & kNormalised) to[k].weight /= total;
      to[k].weight *= router_.scale;
    }
  }

 private:
  static constexpr float kNever = -std::numeric_limits<float>::infinity();

  float* const logits_;
  const int64_t count_;
  const float* const bias_;
  const Router& router_;
  std::vector<float> ranks_;
  std::vector<bool> taken_ = std::vector<bool>(count_);

  // Replaces logits by scores.
  void score() {
    if (router_.flags & kSigmoid) {
      each(count_, [&]<class V>(V, int64_t i) {
        const F32x16 all = activations::sigmoid(read<V>(logits_ + i) - F32x16{}).value;
        if constexpr (kCount<V> == 1) logits_[i] = all[0];
        else put(logits_ + i, all);
      });
      return;
    }
    float total = powers(logits_, *std::max_element(logits_, logits_ + count_));
    for (int64_t i = 0; i < count_; i++) logits_[i] /= total;
  }

  // Replaces each x by e^(x - most); returns their sum.
  float powers(float* x, float most) const {
    float total = 0;
    each(count_, [&]<class V>(V, int64_t i) {
      const F32x16 all = exponential(read<V>(x + i) - most - F32x16{});
      if constexpr (kCount<V> == 1) x[i] = all[0];
      else put(x + i, all);
    });
    for (int64_t i = 0; i < count_; i++) total += x[i];
    return total;
  }

  void rank() {
    if (router_.flags & kRanksScores) std::copy_n(logits_, count_, ranks_.data());
    for (int64_t i = 0; bias_ && i < count_; i++) ranks_[i] += bias_[i];
    if (router_.best_groups == router_.groups) return;
    const int64_t size = count_ / router_.groups;
    std::vector<float> best(router_.groups);
    for (int64_t g = 0; g < router_.groups; g++) {
      float first = kNever, second = kNever;
      for (int64_t i = g * size; i < (g + 1) * size; i++) {
        if (ranks_[i] > first) second = first, first = ranks_[i];
        else if (ranks_[i] > second) second = ranks_[i];
      }
      best[g] = router_.flags & kTopTwo ? first + second : first;
    }
    for (int64_t g = 0; g < router_.groups; g++) {
      int64_t better = 0;  // the number of groups that come before this one
      for (int64_t other = 0; other < router_.groups; other++)
        better += best[other] > best[g] || (best[other] == best[g] && other < g);
      if (better >= router_.best_groups) std::fill_n(ranks_.data() + g * size, size, kNever);
    }
  }

  // The expert with the highest rank that is not taken yet; the first of equal ones.
  int64_t take_best() {
    int64_t best = -1;
    for (int64_t i = 0; i < count_; i++)
      if (!taken_[i] && (best < 0 || ranks_[i] > ranks_[best])) best = i;
    taken_[best] = true;
    return best;
  }

  // One expert after another, weighted among those with similar logits (GRIN, 2409.12136).
  void mix_sparsely(Choice* to) {
    std::vector<float> rivals(count_);
    for (int64_t k = 0; k < router_.top_k; k++) {
      const std::vector<bool> before = taken_;
      const int64_t best = take_best();
      const float most = logits_[best];
      for (int64_t i = 0; i < count_; i++) {
        const bool far = (most - logits_[i]) / std::max(std::abs(logits_[i]), most) > 2 * router_.jitter;
        rivals[i] = before[i] || far ? kNever : logits_[i];
      }
      const float total = powers(rivals.data(), most);
      to[k] = {int32_t(best), rivals[best] / total, 0};
    }
  }
};

}  // namespace workhorse::experts

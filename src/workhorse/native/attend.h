// Attention of one query a head over a cache: y = softmax(q Kᵀ · scale) V.
//
// A piece of work is one row of the batch and one head of keys, with all the heads of queries that
// share it. Keys and values are each read once, front to back, a few slots at a time, so that the
// queries of a head find them in the first cache. Sums, weights and the softmax are float32.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "rows.h"

namespace workhorse {

constexpr int kSlots = 32;  // at a time
constexpr int kSoon = 24;   // slots ahead that are asked for
constexpr int kWide = 16;   // numbers of a vector
constexpr float kHidden = -std::numeric_limits<float>::infinity();

typedef float F32x4 __attribute__((vector_size(16)));

inline F32x16 widen(const float* from) { return load<F32x16>(from); }

// The sums of four vectors, their halves and quarters folded together.
inline F32x4 sums(const F32x16* v) {
  auto fold = [](F32x16 a, F32x16 b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30,
                                   31);
  };
  const F32x16 a = fold(v[0], v[1]), b = fold(v[2], v[3]);
  // Quarters 0 and 1 belong to the first of each pair, 2 and 3 to the second.
  const F32x16 c =
      __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
      __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  F32x4 total;
  for (int n = 0; n < 4; n++) total[n] = (c[4 * n] + c[4 * n + 1]) + (c[4 * n + 2] + c[4 * n + 3]);
  return total;
}

// e^x for x <= 0, to a few units of the last place: 2^whole · e^rest with |rest| <= ln(2) / 2.
inline F32x16 exponential(F32x16 x) {
  typedef int32_t I32x16 __attribute__((vector_size(64)));
  const F32x16 floor = F32x16{} - 87.0f;
  x = x < floor ? floor : x;  // e^-87 is the least that is not denormal; NaN stays what it is
  const I32x16 whole = __builtin_convertvector(x * 1.44269504f - 0.5f, I32x16);
  const F32x16 w = __builtin_convertvector(whole, F32x16);
  const F32x16 rest = (x - w * 0.693359375f) + w * 2.12194440e-4f;
  F32x16 power = rest * (1.0f / 5040) + 1.0f / 720;
  for (float factor : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    power = power * rest + factor;
  return power * (F32x16)((whole + 127) << 23);
}

template <class T>
struct Heads {  // (batch, heads, slots, width), width side by side
  const T* data;
  int64_t batch_stride, head_stride, slot_stride;

  const T* at(int64_t row, int64_t head, int64_t slot = 0) const {
    return data + row * batch_stride + head * head_stride + slot * slot_stride;
  }
};

template <class T>
struct Attend {
  Heads<T> q, k, v;
  const bool* mask;  // (batch or 1, slots), true where a slot is seen; may be null
  int64_t mask_stride;
  T* y;  // (batch, heads, 1, value width)
  int64_t heads, kv_heads, slots, width, value_width;
  float scale;

  // Pieces `begin` to `end`.
  void run(int64_t begin, int64_t end) const {
    const int64_t group = heads / kv_heads, padded = round_up(slots, kWide);
    std::vector<float> weights(group * padded), sums(group * round_up(value_width, kWide));
    for (int64_t piece = begin; piece < end; piece++) {
      const int64_t row = piece / kv_heads, head = piece % kv_heads;
      const bool* seen = mask ? mask + row * mask_stride : nullptr;
      Range range{0, slots};  // the slots outside are not read
      while (seen && range.first < range.last && !seen[range.last - 1]) range.last--;
      while (seen && range.first < range.last && !seen[range.first]) range.first++;
      std::fill(weights.begin(), weights.end(), kHidden);
      score(row, head, range, seen, weights.data(), padded);
      for (int64_t g = 0; g < group; g++) softmax(weights.data() + g * padded, padded);
      mix(row, head, range, weights.data(), padded, sums.data());
    }
  }

 private:
  struct Range {
    int64_t first, last;
  };

  static int64_t round_up(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

  void score(int64_t row, int64_t head, Range range, const bool* seen, float* scores,
             int64_t padded) const {
    const int64_t group = heads / kv_heads;
    for (int64_t first = range.first; first < range.last; first += kSlots)
      for (int64_t g = 0; g < group; g++) {
        const T* query = q.at(row, head * group + g);
        float* to = scores + g * padded;
        const int64_t last = std::min(first + kSlots, range.last);
        int64_t slot = first;
        for (; slot + 4 <= last; slot += 4) dots<4>(query, row, head, slot, to);
        for (; slot < last; slot++) dots<1>(query, row, head, slot, to);
        for (slot = first; slot < last; slot++)
          if (seen && !seen[slot]) to[slot] = kHidden;
      }
  }

  template <int Slots>
  void dots(const T* query, int64_t row, int64_t head, int64_t slot, float* scores) const {
    constexpr int step = Dot<T>::step;
    F32x16 totals[4] = {};
    for (int n = 0; n < Slots; n++) {
      const T* key = k.at(row, head, slot + n);
      const T* later = k.at(row, head, slot + n + kSoon);
      int64_t i = 0;
      for (; i + step <= width; i += step) {
        expect(later + i);
        totals[n] = Dot<T>::add(totals[n], key + i, query + i);
      }
      for (; i < width; i++) totals[n][0] += to_float(key[i]) * to_float(query[i]);
    }
    if constexpr (Slots == 1) {
      scores[slot] = scale * sum(totals[0]);
    } else {
      const F32x4 four = sums(totals);
      for (int n = 0; n < 4; n++) scores[slot + n] = scale * four[n];
    }
  }

  // In place. A query that sees nothing gets weights of zero.
  static void softmax(float* scores, int64_t padded) {
    F32x16 most = load<F32x16>(scores);
    for (int64_t i = kWide; i < padded; i += kWide) {
      const F32x16 some = load<F32x16>(scores + i);
      most = some > most ? some : most;
    }
    float peak = most[0];
    for (int i = 1; i < kWide; i++) peak = std::max(peak, most[i]);
    const F32x16 hidden = F32x16{} + kHidden;
    F32x16 total = {};
    for (int64_t i = 0; i < padded; i += kWide) {
      const F32x16 some = load<F32x16>(scores + i);
      const F32x16 weight = some == hidden ? F32x16{} : exponential(some - peak);
      total += weight;
      std::memcpy(scores + i, &weight, sizeof weight);
    }
    const float whole = sum(total);
    const float share = whole > 0 ? 1 / whole : 0;
    for (int64_t i = 0; i < padded; i++) scores[i] *= share;
  }

  void mix(int64_t row, int64_t head, Range range, const float* weights, int64_t padded,
           float* sums) const {
    const int64_t group = heads / kv_heads, room = round_up(value_width, kWide);
    std::fill(sums, sums + group * room, 0.0f);
    for (int64_t first = range.first; first < range.last; first += kSlots)
      for (int64_t g = 0; g < group; g++) {
        const int64_t last = std::min(first + kSlots, range.last);
        add(row, head, weights + g * padded, first, last, sums + g * room);
      }
    for (int64_t g = 0; g < group; g++) {
      T* to = y + (row * heads + head * group + g) * value_width;
      for (int64_t i = 0; i < value_width; i++) store(to + i, sums[g * room + i]);
    }
  }

  // Slots `first` to `last` onto the sums of one query.
  void add(int64_t row, int64_t head, const float* weights, int64_t first, int64_t last,
           float* sums) const {
    int64_t i = 0;
    for (; i + 4 * kWide <= value_width; i += 4 * kWide)
      columns<4>(row, head, weights, first, last, i, sums);
    for (; i + kWide <= value_width; i += kWide)
      columns<1>(row, head, weights, first, last, i, sums);
    for (; i < value_width; i++)
      for (int64_t slot = first; slot < last; slot++)
        sums[i] += weights[slot] * to_float(v.at(row, head, slot)[i]);
  }

  template <int Vectors>
  void columns(int64_t row, int64_t head, const float* weights, int64_t first, int64_t last,
               int64_t i, float* sums) const {
    F32x16 total[Vectors];
    for (int n = 0; n < Vectors; n++) total[n] = load<F32x16>(sums + i + n * kWide);
    for (int64_t slot = first; slot < last; slot++) {
      const T *value = v.at(row, head, slot) + i, *later = v.at(row, head, slot + kSoon) + i;
      for (int n = 0; n < Vectors; n++) {
        expect(later + n * kWide);
        total[n] += weights[slot] * widen(value + n * kWide);
      }
    }
    std::memcpy(sums + i, total, sizeof total);
  }
};

}  // namespace workhorse

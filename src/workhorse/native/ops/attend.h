// Attention of one query a head over a cache: y = softmax(q Kᵀ · scale) V.
//
// A unit of work is one row of the batch and one head of keys, with all the heads of queries that
// share it. Keys and values are each read once, front to back, a few slots at a time, so that the
// queries of a head find them in the first cache. Memory is never left waiting: near the end of the keys
// the values are asked for, and near theirs the next unit's keys. Sums, weights and the softmax are
// float32.
#pragma once

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "simd/dot.h"
#include "simd/exponential.h"

namespace workhorse::attend {

constexpr int kWide = 16;  // numbers of a vector, and slots at a time
constexpr int kSoon = 48;  // slots ahead that are asked for
constexpr float kHidden = -std::numeric_limits<float>::infinity();

// Of every 2 W lanes the sums of the first W and the last W: of a in the first of them, of b in the last.
template <int W, int... Lane>
inline F32x16 fold(F32x16 a, F32x16 b, std::integer_sequence<int, Lane...>) {
  return __builtin_shufflevector(
             a, b, (Lane / W % 2 * kWide + Lane / (2 * W) * (2 * W) + Lane % W)...) +
         __builtin_shufflevector(
             a, b, (Lane / W % 2 * kWide + Lane / (2 * W) * (2 * W) + Lane % W + W)...);
}

template <int W>
inline void fold(F32x16 (&v)[kWide]) {
  for (int n = 0; n < W; n++)
    v[n] = fold<W>(v[n], v[n + W], std::make_integer_sequence<int, kWide>());
}

// The sum of each of 16 vectors.
inline F32x16 sums(F32x16 (&v)[kWide]) {
  fold<8>(v);
  fold<4>(v);
  fold<2>(v);
  fold<1>(v);
  return v[0];
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

  // Units `begin` to `end`.
  void run(int64_t begin, int64_t end) const {
    const int64_t group = heads / kv_heads, padded = round_up(slots, kWide);
    // In which 16 slots from any on have room.
    const int64_t room = padded + kWide;
    std::vector<float> weights(group * room), sums(group * round_up(value_width, kWide));
    for (int64_t n = begin; n < end; n++) {
      Unit unit{n / kv_heads, n % kv_heads, 0, slots};  // the slots outside are not read
      const bool* seen = mask ? mask + unit.row * mask_stride : nullptr;
      while (seen && unit.first < unit.last && !seen[unit.last - 1]) unit.last--;
      while (seen && unit.first < unit.last && !seen[unit.first]) unit.first++;
      std::fill(weights.begin(), weights.end(), kHidden);
      score(unit, seen, weights.data(), room);
      for (int64_t g = 0; g < group; g++) softmax(weights.data() + g * room, padded);
      mix(unit, weights.data(), room, sums.data());
    }
  }

 private:
  struct Unit {
    int64_t row, head, first, last;
  };

  static int64_t round_up(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

  // What is read kSoon slots after these keys: others, or values.
  const T* after_key(const Unit& unit, int64_t slot) const {
    const int64_t soon = slot + kSoon, over = soon - unit.last;
    return over < 0 ? k.at(unit.row, unit.head, soon)
                    : v.at(unit.row, unit.head, unit.first + over);
  }

  // The same after values: others, or the next unit's keys.
  const T* after_value(const Unit& unit, int64_t slot) const {
    const int64_t soon = slot + kSoon, over = soon - unit.last;
    if (over < 0) return v.at(unit.row, unit.head, soon);
    const bool same_row = unit.head + 1 < kv_heads;
    return k.at(unit.row + !same_row, same_row ? unit.head + 1 : 0, unit.first + over);
  }

  void score(const Unit& unit, const bool* seen, float* scores, int64_t room) const {
    const int64_t group = heads / kv_heads;
    for (int64_t slot = unit.first; slot < unit.last; slot += kWide) {
      const int64_t count = std::min<int64_t>(unit.last - slot, kWide);
      const auto hidden = unseen(seen ? seen + slot : nullptr, count);
      for (int64_t g = 0; g < group; g++) {
        const F32x16 all = dots(q.at(unit.row, unit.head * group + g), unit, slot, count);
        const F32x16 some = hidden ? F32x16{} + kHidden : all * scale;
        std::memcpy(scores + g * room + slot, &some, sizeof some);
      }
    }
  }

  // True in the lanes of slots that are not seen, and in those past `count`.
  static auto unseen(const bool* seen, int64_t count) {
    typedef uint8_t U8x16 __attribute__((vector_size(16)));
    U8x16 flags = {};
    if (!seen)
      std::memset(&flags, 1, count);
    else if (count == kWide)
      flags = load<U8x16>(seen);
    else
      std::memcpy(&flags, seen, count);
    return __builtin_convertvector(flags, U32x16) == 0;
  }

  // The products of a query with 16 keys; the last of `count` stands for those past it.
  F32x16 dots(const T* query, const Unit& unit, int64_t slot, int64_t count) const {
    constexpr int step = Dot<T>::step;
    const T *keys[kWide], *later[kWide];
    for (int n = 0; n < kWide; n++) {
      const int64_t one = slot + std::min<int64_t>(n, count - 1);
      keys[n] = k.at(unit.row, unit.head, one);
      later[n] = after_key(unit, one);
    }
    F32x16 totals[kWide] = {};
    int64_t i = 0;
    for (; i + step <= width; i += step)
      for (int n = 0; n < kWide; n++) {
        expect(later[n] + i);
        totals[n] = Dot<T>::add(totals[n], keys[n] + i, query + i);
      }
    F32x16 all = sums(totals);
    for (; i < width; i++)
      for (int n = 0; n < kWide; n++) all[n] += to_float(keys[n][i]) * to_float(query[i]);
    return all;
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

  void mix(const Unit& unit, const float* weights, int64_t room, float* sums) const {
    const int64_t group = heads / kv_heads, wide = round_up(value_width, kWide);
    std::fill(sums, sums + group * wide, 0.0f);
    for (int64_t slot = unit.first; slot < unit.last; slot += kWide) {
      const int64_t last = std::min(slot + kWide, unit.last);
      for (int64_t g = 0; g < group; g++)
        add(unit, weights + g * room, slot, last, sums + g * wide);
    }
    for (int64_t g = 0; g < group; g++) {
      T* to = y + (unit.row * heads + unit.head * group + g) * value_width;
      for (int64_t i = 0; i < value_width; i++) store(to + i, sums[g * wide + i]);
    }
  }

  // Slots `first` to `last` onto the sums of one query.
  void add(const Unit& unit, const float* weights, int64_t first, int64_t last,
           float* sums) const {
    int64_t i = 0;
    for (; i + 4 * kWide <= value_width; i += 4 * kWide)
      columns<4>(unit, weights, first, last, i, sums);
    for (; i + kWide <= value_width; i += kWide) columns<1>(unit, weights, first, last, i, sums);
    for (; i < value_width; i++)
      for (int64_t slot = first; slot < last; slot++)
        sums[i] += weights[slot] * to_float(v.at(unit.row, unit.head, slot)[i]);
  }

  template <int Vectors>
  void columns(const Unit& unit, const float* weights, int64_t first, int64_t last, int64_t i,
               float* sums) const {
    F32x16 total[Vectors];
    for (int n = 0; n < Vectors; n++) total[n] = load<F32x16>(sums + i + n * kWide);
    for (int64_t slot = first; slot < last; slot++) {
      const T *value = v.at(unit.row, unit.head, slot) + i, *later = after_value(unit, slot) + i;
      for (int n = 0; n < Vectors; n++) {
        if (n * kWide * sizeof(T) % 64 == 0) expect(later + n * kWide);
        total[n] += weights[slot] * widen(value + n * kWide);
      }
    }
    std::memcpy(sums + i, total, sizeof total);
  }
};

}  // namespace workhorse::attend

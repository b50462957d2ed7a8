// Attention of a few queries per head over a paged cache: y = softmax(cap(q Kᵀ · scale) + bias) V.
//
// A unit of work is one row of the batch, one key head, and queries of the heads that share it. Keys and
// values are each read once, in order, a few slots at a time, so that all queries find them in the L1
// cache. To keep memory busy, values are prefetched near the end of the keys, and the next unit's keys
// near the end of the values. Sums, weights and the softmax are float32. Queries are computed
// independently: a result's bits depend neither on other queries nor on the number of threads.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "ops/scratch.h"
#include "simd/dot.h"
#include "simd/elementwise.h"
#include "simd/exponential.h"
#include "simd/sums.h"

namespace workhorse::attend {

constexpr int kWide = 16;  // lanes of a vector, and slots at a time
constexpr int kSoon = 48;  // prefetch distance in slots
constexpr int kMany = 4;   // number of queries that share one widening of the values
constexpr int kMost = 32;  // queries of a unit: their scores stay in the L2 cache
constexpr float kHidden = -std::numeric_limits<float>::infinity();

// Keys or values, (heads, blocks, slots of a block, width), contiguous along the width.
template <class T>
struct Blocks {
  const T* data;
  int64_t head_stride, block_stride, slot_stride;
};

template <class T>
struct Heads {  // (batch, heads, seq, width), contiguous along the width
  T* data;
  int64_t batch_stride, head_stride, seq_stride;

  T* at(int64_t row, int64_t head, int64_t s) const {
    return data + row * batch_stride + head * head_stride + s * seq_stride;
  }
};

// Number of units that divide the queries of a row's key head: more than one if there are fewer heads than shares, or
// many queries.
inline int64_t splits_of(int64_t shares, int64_t heads_of_all_rows, int64_t queries) {
  const int64_t heads = std::max<int64_t>(1, heads_of_all_rows);
  return std::clamp<int64_t>((shares + heads - 1) / heads, (queries + kMost - 1) / kMost, std::max<int64_t>(1, queries));
}

template <class T>
struct Attend {
  Heads<const T> q;
  Blocks<T> k, v;
  Heads<T> y;
  const int64_t* table;  // (batch, blocks of a row): the block table of each row
  const int64_t *first, *last;  // (batch, seq): a query sees the slots [first, last)
  int64_t heads, kv_heads, seq, blocks, block, width, value_width;  // `block` is a multiple of kWide
  int64_t splits;  // units among which the queries of a row's key head are divided
  float scale;
  const float* slopes;  // of each head for ALiBi (2108.12409), whose bias is -slope · (last - 1 - slot); or null
  float softcap = 0;           // bound of the scores (Gemma 2); 0 for none
  const T* sinks = nullptr;    // a logit of each head that gets a weight but has no value (gpt-oss); or null

  // Computes units [begin, end).
  void run(int64_t begin, int64_t end) const {
    const int64_t group = heads / kv_heads * seq, each = (group + splits - 1) / splits;
    std::vector<float> sums(each * round_up(value_width, kWide));
    thread_local ScratchBuffer buffer;
    for (int64_t n = begin; n < end; n++) {
      const int64_t share = std::min(n % splits * each, group);  // the last units may have none
      Unit unit{n / splits / kv_heads, n / splits % kv_heads, share,
                  std::min(share + each, group), blocks * block, 0};
      for (int64_t g = 0; g < std::min(unit.end - unit.begin, seq); g++) {
        const Seen seen = seen_by(unit, g);
        unit.first = std::min(unit.first, seen.first);
        unit.last = std::max(unit.last, seen.last);
      }
      unit.first = std::min(unit.first / kWide * kWide, unit.last);
      const int64_t room = round_up(unit.last - unit.first, kWide) + kWide;
      float* const weights = (float*)buffer.at_least((unit.end - unit.begin) * room * sizeof(float));
      score(unit, weights, room);
      for (int64_t g = 0; g < unit.end - unit.begin; g++) {
        const Seen seen = seen_by(unit, g);
        if (seen.first == seen.last) continue;
        const int64_t from = (seen.first - unit.first) / kWide * kWide;
        const float sink = sinks ? to_float(sinks[head(unit, g)]) : kHidden;
        softmax(weights + g * room + from, round_up(seen.last - unit.first, kWide) - from, sink);
      }
      mix(unit, weights, room, sums.data());
    }
  }

 private:
  struct Unit {
    int64_t row, head, begin, end;  // queries [begin, end) of the key head, by query head, then position
    int64_t first, last;  // no query sees a slot outside [first, last)
  };

  const T* at(const Blocks<T>& in, const Unit& unit, int64_t slot) const {
    const int64_t number = table[unit.row * blocks + slot / block];
    return in.data + unit.head * in.head_stride + number * in.block_stride +
           slot % block * in.slot_stride;
  }

  // The address to prefetch: kSoon slots after this one, a later key or a value.
  const T* after_key(const Unit& unit, int64_t slot) const {
    const int64_t soon = slot + kSoon, over = soon - unit.last;
    if (over < 0) return at(k, unit, soon);
    return at(v, unit, std::min(unit.first + over, unit.last - 1));
  }

  // The address to prefetch for values: a later value, or a key of the next head.
  const T* after_value(const Unit& unit, int64_t slot) const {
    const int64_t soon = slot + kSoon, over = soon - unit.last;
    if (over < 0) return at(v, unit, soon);
    Unit next = unit;
    next.head = unit.head + 1 < kv_heads ? unit.head + 1 : 0;
    return at(k, next, std::min(unit.first + over, unit.last - 1));
  }

  struct Seen {
    int64_t first, last;
  };

  // The slots that a query of a unit sees.
  Seen seen_by(const Unit& unit, int64_t g) const {
    const int64_t place = unit.row * seq + (unit.begin + g) % seq;
    return {std::min(first[place], last[place]), last[place]};
  }

  // The head of a query of a unit.
  int64_t head(const Unit& unit, int64_t g) const { return unit.head * (heads / kv_heads) + (unit.begin + g) / seq; }

  // The address of a query of a unit, or of its result.
  template <class Number>
  Number* of(const Heads<Number>& all, const Unit& unit, int64_t g) const {
    return all.at(unit.row, head(unit, g), (unit.begin + g) % seq);
  }

  void score(const Unit& unit, float* scores, int64_t room) const {
    for (int64_t slot = unit.first; slot < unit.last; slot += kWide) {
      const int64_t count = std::min<int64_t>(unit.last - slot, kWide);
      const T *keys = at(k, unit, slot), *later = after_key(unit, slot);
      for (int64_t g = 0; g < unit.end - unit.begin; g++) {
        const Seen seen = seen_by(unit, g);
        if (seen.last <= slot || seen.first >= slot + count) continue;
        F32x16 all = dots(of(q, unit, g), keys, g ? nullptr : later, count) * scale;
        if (softcap) all = hyperbolic_tangent(all / softcap) * softcap;
        if (slopes)
          all = fma(convert<F32x16>(lane_numbers() + int32_t(slot + 1 - seen.last)), slopes[head(unit, g)], all);
        put(scores + g * room + slot - unit.first, select(inside(slot, seen), all, F32x16{} + kHidden));
      }
    }
  }

  // True in the lanes of visible slots.
  static I32x16 inside(int64_t slot, Seen seen) {
    const I32x16 lanes = lane_numbers();
    const int32_t from = int32_t(std::clamp<int64_t>(seen.first - slot, 0, kWide));
    const int32_t to = int32_t(std::clamp<int64_t>(seen.last - slot, 0, kWide));
    return (lanes >= from) & (lanes < to);
  }

  // The dot products of a query with 16 keys; beyond `count`, the last key is repeated.
  F32x16 dots(const T* query, const T* first_key, const T* later, int64_t count) const {
    constexpr int step = Dot<T>::step;
    const T* keys[kWide];
    for (int n = 0; n < kWide; n++)
      keys[n] = first_key + std::min<int64_t>(n, count - 1) * k.slot_stride;
    F32x16 totals[kWide] = {};
    int64_t i = 0;
    for (; i + step <= width; i += step)
      for (int n = 0; n < kWide; n++) {
        if (later) expect(later + n * k.slot_stride + i);
        totals[n] = Dot<T>::add(totals[n], keys[n] + i, query + i);
      }
    for (; i + kWide <= width; i += kWide)  // the first half of a step of bfloat16
      for (int n = 0; n < kWide; n++) totals[n] = fma(read<F32x16>(keys[n] + i), read<F32x16>(query + i), totals[n]);
    F32x16 all = sums(totals);
    for (; i < width; i++) {
      float key[kWide];
      for (int n = 0; n < kWide; n++) key[n] = to_float(keys[n][i]);
      all = fma(load<F32x16>(key), to_float(query[i]), all);
    }
    return all;
  }

  // In place; `sink` is one more score, whose weight is dropped.
  static void softmax(float* scores, int64_t padded, float sink) {
    F32x16 most = load<F32x16>(scores);
    for (int64_t i = kWide; i < padded; i += kWide) {
      const F32x16 some = load<F32x16>(scores + i);
      most = select(some > most, some, most);
    }
    float peak = std::max(most[0], sink);
    for (int i = 1; i < kWide; i++) peak = std::max(peak, most[i]);
    const F32x16 hidden = F32x16{} + kHidden;
    F32x16 total = {};
    for (int64_t i = 0; i < padded; i += kWide) {
      const F32x16 some = load<F32x16>(scores + i);
      const F32x16 weight = select(some == hidden, F32x16{}, exponential(some - peak));
      total += weight;
      put(scores + i, weight);
    }
    float whole = sum(total);
    if (sink > kHidden) whole += exponential(F32x16{} + (sink - peak))[0];
    const float share = whole > 0 ? 1 / whole : 0;
    for (int64_t i = 0; i < padded; i++) scores[i] *= share;
  }

  void mix(const Unit& unit, const float* weights, int64_t room, float* sums) const {
    const int64_t group = unit.end - unit.begin, wide = round_up(value_width, kWide);
    std::vector<float> widened(group >= kMany ? kWide * value_width : 0);
    std::fill(sums, sums + group * wide, 0.0f);
    for (int64_t slot = unit.first; slot < unit.last; slot += kWide) {
      const int64_t count = std::min<int64_t>(unit.last - slot, kWide);
      const T *values = at(v, unit, slot), *later = after_value(unit, slot);
      for (int64_t n = 0; n < count && !widened.empty(); n++)
        each(value_width, [&]<class V>(V, int64_t i) {
          write(&widened[n * value_width + i], read<V>(values + n * v.slot_stride + i));
        });
      for (int64_t g = 0; g < group; g++) {
        // A query reads only the slots that it sees.
        const Seen seen = seen_by(unit, g);
        const int64_t from = std::max<int64_t>(seen.first - slot, 0), to = std::min(seen.last - slot, count);
        const float* const by = weights + g * room + slot - unit.first;
        if (widened.empty()) add(values, v.slot_stride, g ? nullptr : later, by, from, to, sums + g * wide);
        else add(widened.data(), value_width, (const float*)nullptr, by, from, to, sums + g * wide);
      }
    }
    for (int64_t g = 0; g < group; g++) {
      T* const to = of(y, unit, g);
      each(value_width, [&]<class V>(V, int64_t i) { write(to + i, read<V>(sums + g * wide + i)); });
    }
  }

  // Adds the weighted values of slots [from, to), `stride` apart, to the sums of one query.
  template <class Value>
  void add(const Value* values, int64_t stride, const Value* later, const float* weights, int64_t from,
           int64_t to, float* sums) const {
    int64_t i = 0;
    for (; i + 4 * kWide <= value_width; i += 4 * kWide)
      columns<4>(values, stride, later, weights, from, to, i, sums);
    for (; i + kWide <= value_width; i += kWide)
      columns<1>(values, stride, later, weights, from, to, i, sums);
    for (; i < value_width; i++)
      for (int64_t slot = from; slot < to; slot++)
        sums[i] = fma(weights[slot], to_float(values[slot * stride + i]), sums[i]);
  }

  template <int Vectors, class Value>
  void columns(const Value* values, int64_t stride, const Value* later, const float* weights, int64_t from,
               int64_t to, int64_t i, float* sums) const {
    F32x16 total[Vectors];
    for (int n = 0; n < Vectors; n++) total[n] = load<F32x16>(sums + i + n * kWide);
    for (int64_t slot = from; slot < to; slot++) {
      const Value* value = values + slot * stride + i;
      for (int n = 0; n < Vectors; n++) {
        if (later && n * kWide * sizeof(Value) % 64 == 0)
          expect(later + slot * v.slot_stride + i + n * kWide);
        total[n] = fma(weights[slot], widen(value + n * kWide), total[n]);
      }
    }
    for (int n = 0; n < Vectors; n++) put(sums + i + n * kWide, total[n]);
  }
};

}  // namespace workhorse::attend

// Attention of one query a head over a cache: y = softmax(q Kᵀ · scale) V.
//
// A piece of work is one row of the batch and one head of keys, with all the heads of queries that
// share it. Keys and values are each read once, front to back, a few slots at a time, so that the
// queries of a head find them in the first cache. Memory is never left waiting: near the end of the keys
// the values are asked for, and near theirs the next piece's keys. Sums, weights and the softmax are
// float32.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "exponential.h"
#include "rows.h"

namespace workhorse {

constexpr int kSlots = 32;  // at a time
constexpr int kSoon = 48;   // slots ahead that are asked for
constexpr int kWide = 16;   // numbers of a vector
constexpr float kHidden = -std::numeric_limits<float>::infinity();

typedef float F32x4 __attribute__((vector_size(16)));

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
    for (int64_t n = begin; n < end; n++) {
      Piece piece{n / kv_heads, n % kv_heads, 0, slots};  // the slots outside are not read
      const bool* seen = mask ? mask + piece.row * mask_stride : nullptr;
      while (seen && piece.first < piece.last && !seen[piece.last - 1]) piece.last--;
      while (seen && piece.first < piece.last && !seen[piece.first]) piece.first++;
      std::fill(weights.begin(), weights.end(), kHidden);
      score(piece, seen, weights.data(), padded);
      for (int64_t g = 0; g < group; g++) softmax(weights.data() + g * padded, padded);
      mix(piece, weights.data(), padded, sums.data());
    }
  }

 private:
  struct Piece {
    int64_t row, head, first, last;
  };

  static int64_t round_up(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

  // What is read kSoon slots after these keys and values.
  const T* after_key(const Piece& piece, int64_t slot) const {
    const int64_t soon = slot + kSoon, over = soon - piece.last;
    return over < 0 ? k.at(piece.row, piece.head, soon)
                    : v.at(piece.row, piece.head, piece.first + over);
  }
  const T* after_value(const Piece& piece, int64_t slot) const {
    const int64_t soon = slot + kSoon, over = soon - piece.last;
    if (over < 0) return v.at(piece.row, piece.head, soon);
    const int64_t next = piece.row * kv_heads + piece.head + 1;
    return k.at(next / kv_heads, next % kv_heads, piece.first + over);
  }

  void score(const Piece& piece, const bool* seen, float* scores, int64_t padded) const {
    const int64_t group = heads / kv_heads;
    for (int64_t first = piece.first; first < piece.last; first += kSlots)
      for (int64_t g = 0; g < group; g++) {
        const T* query = q.at(piece.row, piece.head * group + g);
        float* to = scores + g * padded;
        const int64_t last = std::min(first + kSlots, piece.last);
        int64_t slot = first;
        for (; slot + 4 <= last; slot += 4) dots<4>(query, piece, slot, to);
        for (; slot < last; slot++) dots<1>(query, piece, slot, to);
        for (slot = first; slot < last; slot++)
          if (seen && !seen[slot]) to[slot] = kHidden;
      }
  }

  template <int Slots>
  void dots(const T* query, const Piece& piece, int64_t slot, float* scores) const {
    constexpr int step = Dot<T>::step;
    F32x16 totals[4] = {};
    for (int n = 0; n < Slots; n++) {
      const T *key = k.at(piece.row, piece.head, slot + n), *later = after_key(piece, slot + n);
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

  void mix(const Piece& piece, const float* weights, int64_t padded, float* sums) const {
    const int64_t group = heads / kv_heads, room = round_up(value_width, kWide);
    std::fill(sums, sums + group * room, 0.0f);
    for (int64_t first = piece.first; first < piece.last; first += kSlots)
      for (int64_t g = 0; g < group; g++) {
        const int64_t last = std::min(first + kSlots, piece.last);
        add(piece, weights + g * padded, first, last, sums + g * room);
      }
    for (int64_t g = 0; g < group; g++) {
      T* to = y + (piece.row * heads + piece.head * group + g) * value_width;
      for (int64_t i = 0; i < value_width; i++) store(to + i, sums[g * room + i]);
    }
  }

  // Slots `first` to `last` onto the sums of one query.
  void add(const Piece& piece, const float* weights, int64_t first, int64_t last,
           float* sums) const {
    int64_t i = 0;
    for (; i + 4 * kWide <= value_width; i += 4 * kWide)
      columns<4>(piece, weights, first, last, i, sums);
    for (; i + kWide <= value_width; i += kWide) columns<1>(piece, weights, first, last, i, sums);
    for (; i < value_width; i++)
      for (int64_t slot = first; slot < last; slot++)
        sums[i] += weights[slot] * to_float(v.at(piece.row, piece.head, slot)[i]);
  }

  template <int Vectors>
  void columns(const Piece& piece, const float* weights, int64_t first, int64_t last, int64_t i,
               float* sums) const {
    F32x16 total[Vectors];
    for (int n = 0; n < Vectors; n++) total[n] = load<F32x16>(sums + i + n * kWide);
    for (int64_t slot = first; slot < last; slot++) {
      const T *value = v.at(piece.row, piece.head, slot) + i, *later = after_value(piece, slot) + i;
      for (int n = 0; n < Vectors; n++) {
        expect(later + n * kWide);
        total[n] += weights[slot] * widen(value + n * kWide);
      }
    }
    std::memcpy(sums + i, total, sizeof total);
  }
};

}  // namespace workhorse

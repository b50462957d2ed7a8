// y = x Wᵀ + b for few rows of x, with W laid out as in `nn.Linear`: dot products of rows.
//
// For one row it takes as long as reading W: row by row on AMD CPUs, four rows in parallel elsewhere, with prefetch of
// the next ones. Four rows of x are multiplied while a part of W is in registers, and further rows while it is in the
// L1 cache. For that, long rows are cut, and sums are kept from one cut to the next.
// The rounding of an element depends only on the length of its sum.
#pragma once

#include <algorithm>

#include "ops/scratch.h"
#include "simd/dot.h"
#include "simd/sums.h"

namespace workhorse::linear {

constexpr int kOut = 4;              // rows of W side by side
constexpr int kRows = 4;             // rows of x at a time
constexpr int kTogether = 16;        // rows of W whose totals are rounded together if x has one row
constexpr int64_t kTall = 64;        // rows of W that all rows of x are multiplied by before the next
constexpr int64_t kPanel = 64;       // rows of x at a time, whose sums are kept from one cut to the next
constexpr int64_t kCut = 1 << 12;    // bytes of a cut of a row: four of W and four of x fit into L1

// The weights that x is multiplied by, and the destination of the result.
template <class T>
struct Layer {
  const T *weight, *bias;  // bias may be null
  T* y;
  int64_t out;
};

template <class T>
struct Rows {
  const T* x;
  int64_t rows, in;

  // Outputs `begin` to `end` of a layer for every row of x.
  void run(const Layer<T>& layer, int64_t begin, int64_t end) const {
    [[maybe_unused]] const typename Dot<T>::Rounding alike{};
    each_output(layer, begin, end);
  }

 private:
  // A panel of x stays in the L2 cache meanwhile. Not inlined, so that it stays between `Rounding`'s begin and end.
  [[gnu::noinline]] void each_output(const Layer<T>& layer, int64_t begin, int64_t end) const {
    for (; begin < end; begin += kTall) {
      const int64_t until = std::min(begin + kTall, end);
      for (int64_t r = 0; r < rows; r += kPanel) {
        int64_t o = begin;
        if (rows == 1 && !reads_several())
          for (; o + kTogether <= until; o += kTogether) one_by_one(layer, o);
        else
          for (; o + kOut <= until; o += kOut) block<kOut>(layer, o, r, std::min(r + kPanel, rows));
        for (; o < until; o++) block<1>(layer, o, r, std::min(r + kPanel, rows));
      }
    }
  }

  struct Cut {  // a cut of every row; all but the last cut are whole steps
    int64_t begin, end;
  };

  // True if memory is read fastest by several rows of W at a time. This is not the case on AMD CPUs.
  static bool reads_several() {
#ifdef __x86_64__
    static const bool intel = __builtin_cpu_is("intel");
    return intel;
#else
    return true;
#endif
  }

  // Outputs `o` to `o + kTogether` for the only row of x.
  void one_by_one(const Layer<T>& layer, int64_t o) const {
    constexpr int step = Dot<T>::step;
    constexpr int64_t ahead = kStreamAhead / sizeof(T);
    F32x16 acc[kTogether];
    const T* w = layer.weight + o * in;
    for (int i = 0; i < kTogether; i++, w += in) {
      F32x16 partial{};
      for (int64_t k = 0; k + step <= in; k += step) {
        expect(w + k + ahead);
        partial = Dot<T>::add(partial, w + k, x + k);
      }
      acc[i] = partial;
    }
    finish<kTogether, 1>(layer, o, 0, acc, in / step * step);
  }

  // Outputs `o` to `o + O` for rows `first` to `last` of x.
  template <int O>
  void block(const Layer<T>& layer, int64_t o, int64_t first, int64_t last) const {
    F32x16 kept[kPanel * O];
    const int64_t length = rows > kRows ? kCut / sizeof(T) : in;
    Cut cut{0, 0};
    do {
      cut = {cut.end, std::min(cut.end + length, in)};
      // Prefetches columns while one row after the other is multiplied, a share for each row: more requests at
      // once than the memory can answer would stall everything.
      const int64_t share = first > 0 ? 0 : round_up((cut.end - cut.begin + last - 1) / last, Dot<T>::step);
      const auto ahead = [&](int64_t r, int64_t count) {
        return Cut{cut.begin + r * share, cut.begin + (r + count) * share};
      };
      int64_t r = first;
      for (; r + kRows <= last; r += kRows)
        dots<O, kRows>(layer, o, r, cut, ahead(r, kRows), kept + (r - first) * O);
      for (; r < last; r++) dots<O, 1>(layer, o, r, cut, ahead(r, 1), kept + (r - first) * O);
    } while (cut.end < in);
  }

  template <int O, int R>
  void dots(const Layer<T>& layer, int64_t o, int64_t r, Cut cut, Cut ahead, F32x16* kept) const {
    constexpr int step = Dot<T>::step;
    const T *w = layer.weight + o * in, *xs = x + r * in;
    F32x16 acc[R * O] = {};
    if (cut.begin > 0) std::copy_n(kept, R * O, acc);
    int64_t k = cut.begin;
    for (; k + step <= cut.end; k += step)
      for (int i = 0; i < O; i++) {
        if (ahead.begin <= k && k < ahead.end) expect(w + (i + O) * in + k);
        for (int j = 0; j < R; j++)
          acc[j * O + i] = Dot<T>::template add<(R > 1)>(acc[j * O + i], w + i * in + k, xs + j * in + k);
      }
    if (cut.end < in)
      std::copy_n(acc, R * O, kept);
    else
      finish<O, R>(layer, o, r, acc, k);
  }

  // Adds the rest of the rows from `k` on and the bias, and stores.
  template <int O, int R>
  void finish(const Layer<T>& layer, int64_t o, int64_t r, const F32x16 (&acc)[R * O], int64_t k) const {
    const T *w = layer.weight + o * in, *xs = x + r * in;
    if constexpr (O * R == 16)
      put<O>(layer, o, r, sums(acc), w, xs, k);
    else
      for (int n = 0; n < O * R; n++) {
        const int i = n % O, j = n / O;
        float total = sum(acc[n]) + tail(w + i * in, xs + j * in, k);
        if (layer.bias) total += to_float(layer.bias[o + i]);
        store(layer.y + (r + j) * layer.out + o + i, total);
      }
  }

  // `O` totals for each of one or more rows of y, rounded together.
  template <int O>
  void put(const Layer<T>& layer, int64_t o, int64_t r, F32x16 totals, const T* w, const T* xs, int64_t k) const {
    float more[16];
    const auto add = [&](auto number) {
      for (int n = 0; n < 16; n++) more[n] = number(n % O, n / O);
      totals += load<F32x16>(more);
    };
    if (k < in) add([&](int i, int j) { return tail(w + i * in, xs + j * in, k); });
    if (layer.bias) add([&](int i, int) { return to_float(layer.bias[o + i]); });
    T numbers[16];
    if constexpr (sizeof(T) == sizeof(float)) workhorse::put(numbers, totals);
    else workhorse::put(numbers, convert<U16x16>(rounded<U32x16>(totals)));
    for (int j = 0; j < 16 / O; j++) std::copy_n(numbers + j * O, O, layer.y + (r + j) * layer.out + o);
  }

  float tail(const T* w, const T* xs, int64_t k) const {
    float total = 0;
    if (k + 16 <= in) {  // half a step of bfloat16
      total = sum(widen(w + k) * widen(xs + k));
      k += 16;
    }
    for (; k < in; k++) total = fma(to_float(w[k]), to_float(xs[k]), total);
    return total;
  }
};

}  // namespace workhorse::linear

// The index of the largest element of a row, for greedy decoding.
#pragma once

#include <algorithm>

#include "simd/bf16.h"

namespace workhorse::argmax {

// The index of the largest of `count` elements, the first of equals; -1 if an element is not finite.
template <class T>
int64_t argmax(const T* row, int64_t count) {
  constexpr int wide = 16;
  constexpr uint32_t magnitude = 0x7fffffff, infinite = 0x7f800000;
  F32x16 most = F32x16{} + -__builtin_inff();
  U32x16 where = {}, widest = {};
  int64_t i = 0;
  for (; i + wide <= count; i += wide) {
    const F32x16 some = widen(row + i);
    const U32x16 size = (U32x16)some & magnitude;
    widest = select(size > widest, size, widest);
    where = select(some > most, U32x16{} + uint32_t(i), where);
    most = select(some > most, some, most);
  }
  bool finite = true;
  float best = -__builtin_inff();
  int64_t found = 0;
  const auto meet = [&](float value, int64_t index) {
    if (value > best || (value == best && index < found)) best = value, found = index;
  };
  for (int lane = 0; lane < wide; lane++) {
    finite = finite && widest[lane] < infinite;
    meet(most[lane], where[lane] + lane);
  }
  for (; i < count; i++) {
    const float value = to_float(row[i]);
    finite = finite && (as<uint32_t>(value) & magnitude) < infinite;
    meet(value, i);
  }
  return finite ? found : -1;
}

}  // namespace workhorse::argmax

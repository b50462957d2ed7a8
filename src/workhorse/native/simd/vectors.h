// Vectors of 16 elements, for any CPU.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#ifdef __x86_64__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "simd/halves.h"

namespace workhorse {

using F32x16 = Vector<float, 16>;
using I32x16 = Vector<int32_t, 16>;
using U32x16 = Vector<uint32_t, 16>;
using U16x16 = Vector<uint16_t, 16>;

// Loads a value or a vector from memory, and stores it.
template <class V>
inline V load(const void* from) {
  if constexpr (kHalved<V>) {
    using Half = typename V::Half;
    return {load<Half>(from), load<Half>((const char*)from + sizeof(Half))};
  } else {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
  }
}

template <class V>
inline void put(void* to, V v) {
  if constexpr (kHalved<V>) {
    put(to, v.low);
    put((char*)to + sizeof v.low, v.high);
  } else {
    std::memcpy(to, &v, sizeof v);
  }
}

// The same bits as type To, for a value or a vector.
template <class To, class V>
inline To as(V v) {
  if constexpr (kHalved<V>) return To(v);
  else return std::bit_cast<To>(v);
}

// The values converted to To; towards zero if To is an integer type.
template <class To, class V>
inline To convert(V v) {
  if constexpr (kHalved<V>) return {convert<typename To::Half>(v.low), convert<typename To::Half>(v.high)};
// GCC's own conversion takes several instructions.
#ifdef __AVX512F__
  else if constexpr (std::is_same_v<V, U16x16> && std::is_same_v<To, U32x16>)
    return (To)_mm512_cvtepu16_epi32((__m256i)v);
#elif defined(__AVX2__)
  else if constexpr (std::is_same_v<V, Vector<uint16_t, 8>> && std::is_same_v<To, Vector<uint32_t, 8>>)
    return (To)_mm256_cvtepu16_epi32((__m128i)v);
#endif
  else return __builtin_convertvector(v, To);
}

// mask ? a : b, for a value or each lane of a vector.
template <class Mask, class V>
inline V select(Mask mask, V a, V b) {
  if constexpr (kHalved<V>) return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
  else return mask ? a : b;
}

// a · b + c, for a value or a vector: rounded once if the CPU has an instruction for it, otherwise twice. Compilers may
// not fuse other sums of products (`-ffp-contract=off`). The bits therefore depend neither on the compiler nor on which
// copy of a loop computes an element.
inline float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

template <class V>
inline V fused(V a, V b, V c) {
  if constexpr (kHalved<V>) return {fused(a.low, b.low, c.low), fused(a.high, b.high, c.high)};
#ifdef __AVX512F__
  else return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  else return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  else return (V)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  else return a * b + c;
#endif
}

// The same operation if some arguments are one float for all lanes.
template <class... Some>
inline auto fma(Some... abc) {
  using V = std::conditional_t<(std::is_same_v<Some, F32x16> || ...), F32x16, float>;
  const auto wide = [](auto value) {
    if constexpr (std::is_same_v<decltype(value), V>) return value;
    else return broadcast<V>(value);
  };
  return fused(wide(abc)...);
}

inline I32x16 lane_numbers() {
  static constexpr int32_t numbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load<I32x16>(numbers);
}

// In each group of 2 W lanes, adds the first W and the last W. Sums of a go to the first W, sums of b to the
// last W.
template <int W, class V>
inline V fold(V a, V b) {
  constexpr int lanes = sizeof(V) / sizeof(float);
  if constexpr (kHalved<V> && 2 * W == lanes) {
    return {a.low + a.high, b.low + b.high};
  } else if constexpr (kHalved<V>) {
    return {fold<W>(a.low, b.low), fold<W>(a.high, b.high)};
  } else {
    return [&]<int... Lane>(std::integer_sequence<int, Lane...>) {
      return __builtin_shufflevector(
                 a, b, (Lane / W % 2 * lanes + Lane / (2 * W) * (2 * W) + Lane % W)...) +
             __builtin_shufflevector(
                 a, b, (Lane / W % 2 * lanes + Lane / (2 * W) * (2 * W) + Lane % W + W)...);
    }(std::make_integer_sequence<int, lanes>());
  }
}

// Adds by halves: adding one lane after the other would wait for every addition.
inline float sum(F32x16 v) {
  v = fold<8>(v, v);
  v = fold<4>(v, v);
  return (v[0] + v[2]) + (v[1] + v[3]);
}

// Prefetches a cache line that is read later into the L2 cache. The L1 cache is small, and rows that are a power of two
// apart would evict each other there. Past the end it does nothing.
inline void expect(const void* line) { __builtin_prefetch(line, 0, 2); }

constexpr int64_t kStreamAhead = 1 << 13;  // prefetch distance in bytes for sequential reads

}  // namespace workhorse

// Dot products of bytes with 16-bit integers, four in each of 16 lanes, for weights of 4 or 8 bits.
// The sums are exact, so they are the same on every CPU.
#pragma once

#include <algorithm>
#include <numeric>

#include "simd/vectors.h"

namespace workhorse {

constexpr int kFactors = 32;            // integers of one dot product
constexpr int kSteps = kFactors / 4;    // vectors of bytes that they are multiplied by
constexpr int kMost = 127 * 256 + 127;  // the largest magnitude of an integer

#ifdef __AVX512VNNI__

// One instruction multiplies four bytes in every lane by four bytes and accumulates the products. An integer is
// therefore split into two bytes, 256 high + low.
struct Factors {
  int32_t begin[2];  // initial values of the sums
  int8_t high[kFactors], low[kFactors];

  Factors() {}

  // Each byte will be larger than its value by `offset`.
  Factors(const int16_t (&x)[kFactors], int32_t offset) {
    int32_t sums[2] = {};
    for (int k = 0; k < kFactors; k++) {
      low[k] = int8_t(x[k]);
      high[k] = int8_t((x[k] - low[k]) >> 8);
      sums[0] += high[k];
      sums[1] += low[k];
    }
    for (int i = 0; i < 2; i++) begin[i] = -offset * sums[i];
  }
};

struct ByteDots {
  I32x16 high, low;

  ByteDots() {}
  explicit ByteDots(const Factors& x) : high(I32x16{} + x.begin[0]), low(I32x16{} + x.begin[1]) {}

  // Byte i of each lane is multiplied by integer 4 step + i.
  void add(U32x16 bytes, const Factors& x, int step) {
    high = dot(high, bytes, x.high + 4 * step);
    low = dot(low, bytes, x.low + 4 * step);
  }

  I32x16 total() const { return (high << 8) + low; }

 private:
  static I32x16 dot(I32x16 sum, U32x16 bytes, const int8_t* four) {
    return (I32x16)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)bytes, _mm512_set1_epi32(load<int32_t>(four)));
  }
};

#else

// Adds the products of two 16-bit integers in every lane.
template <class V>
inline V add_products(V sum, V a, V b) {
  if constexpr (kHalved<V>) return {add_products(sum.low, a.low, b.low), add_products(sum.high, a.high, b.high)};
#if defined(__AVX512BW__)
  else return sum + (V)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  else return sum + (V)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
  else return sum + (V)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  else return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// The bytes at odd places, each in 16 bits.
template <class V>
inline V odd_bytes(V bytes) {
  if constexpr (kHalved<V>) return {odd_bytes(bytes.low), odd_bytes(bytes.high)};
  else return (V)((typename Register<uint16_t, sizeof(V) / 2>::type)bytes >> 8);
}

// One instruction multiplies two integers in every lane by two. Bytes and integers are therefore separated into even
// and odd places.
struct Factors {
  int32_t begin;  // of the sum
  int16_t even[kFactors / 2], odd[kFactors / 2];

  Factors() {}

  // Each byte will be larger than its value by `offset`.
  Factors(const int16_t (&x)[kFactors], int32_t offset)
      : begin(-offset * std::accumulate(x, x + kFactors, int32_t{})) {
    for (int k = 0; k < kFactors / 2; k++) even[k] = x[2 * k], odd[k] = x[2 * k + 1];
  }
};

struct ByteDots {
  I32x16 sum;

  ByteDots() {}
  explicit ByteDots(const Factors& x) : sum(I32x16{} + x.begin) {}

  // Byte i of each lane is multiplied by integer 4 step + i.
  void add(U32x16 bytes, const Factors& x, int step) {
    sum = dot(sum, bytes & 0x00ff00ff, x.even + 2 * step);
    sum = dot(sum, odd_bytes(bytes), x.odd + 2 * step);
  }

  I32x16 total() const { return sum; }

 private:
  static I32x16 dot(I32x16 sum, U32x16 numbers, const int16_t* two) {
    return add_products(sum, (I32x16)numbers, I32x16{} + load<int32_t>(two));
  }
};

#endif

// A table of 16 bytes, looked up for each byte of a vector; each byte must be less than 16.
struct ByteTable {
  U32x16 four;  // copies of it

  ByteTable() {}

  explicit ByteTable(const uint8_t* entries) {
    uint8_t copies[4][16];
    for (auto& copy : copies) std::memcpy(copy, entries, sizeof copy);
    four = load<U32x16>(copies);
  }

  U32x16 operator()(U32x16 indices) const { return look_up(four, indices); }

 private:
  template <class V>
  static V look_up(V table, V indices) {
    if constexpr (kHalved<V>) return {look_up(table.low, indices.low), look_up(table.high, indices.high)};
#if defined(__AVX512BW__)
    else return (V)_mm512_shuffle_epi8((__m512i)table, (__m512i)indices);
#elif defined(__AVX2__)
    else return (V)_mm256_shuffle_epi8((__m256i)table, (__m256i)indices);
#elif defined(__SSSE3__)
    else return (V)_mm_shuffle_epi8((__m128i)table, (__m128i)indices);
#else
    else {
      uint8_t entries[sizeof(V)], bytes[sizeof(V)];
      put(entries, table), put(bytes, indices);
      for (uint8_t& byte : bytes) byte = entries[byte];
      return load<V>(bytes);
    }
#endif
  }
};

}  // namespace workhorse

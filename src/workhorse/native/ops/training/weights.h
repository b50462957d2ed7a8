// Values in memory as float32, bfloat16, or float32 in two parts: a bfloat16 and its missing low bits
// (optim/master_weights.py). The loops over them vectorise.
#pragma once

#include <bit>
#include <cstdint>

#include "simd/bf16.h"

namespace workhorse::weights {

struct Split {
  uint16_t* upper;
  int16_t* low_bits;

  float read(int64_t i) const {
    return std::bit_cast<float>((uint32_t(upper[i]) << 16) + uint32_t(low_bits[i]));
  }

  void write(int64_t i, float value) const {
    const uint32_t now = std::bit_cast<uint32_t>(value == value ? value : kNotANumber);
    const uint32_t high = (now + 0x8000) >> 16;
    upper[i] = uint16_t(high);
    low_bits[i] = int16_t(now - (high << 16));
  }

 private:
  static constexpr float kNotANumber = __builtin_nanf("");  // rounding the bits of other NaNs could carry over
};

struct Narrow {  // bfloat16
  uint16_t* at;
  float read(int64_t i) const { return std::bit_cast<float>(uint32_t(at[i]) << 16); }
  void write(int64_t i, float value) const { at[i] = uint16_t(rounded<uint32_t>(value)); }
};

struct Wide {  // float32
  float* at;
  float read(int64_t i) const { return at[i]; }
  void write(int64_t i, float value) const { at[i] = value; }
};

}  // namespace workhorse::weights

// Treatment of values below 2^-126.
#pragma once

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace workhorse {

// While an object exists, its thread treats them as 0, like the instructions that multiply pairs of bfloat16.
class TakingSubnormalsForZero {
#ifdef __x86_64__
 public:
  TakingSubnormalsForZero() { _mm_setcsr(before_ | kOperands | kResults); }
  ~TakingSubnormalsForZero() { _mm_setcsr(before_); }
  TakingSubnormalsForZero(const TakingSubnormalsForZero&) = delete;

 private:
  static constexpr unsigned kOperands = 1 << 6, kResults = 1 << 15;  // bits of MXCSR
  const unsigned before_ = _mm_getcsr();
#endif
};

}  // namespace workhorse

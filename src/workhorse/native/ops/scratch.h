// Division of a matrix into blocks, and a thread's memory for them.
#pragma once

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <cstdint>
#include <cstdlib>
#include <new>

namespace workhorse {

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Divides n into the fewest equal parts of at most `most` and returns their size, a multiple of `step`.
inline int64_t even_part(int64_t n, int64_t most, int64_t step) {
  const int64_t parts = (n + most - 1) / most;
  return round_up((n + parts - 1) / parts, step);
}

// Memory of a thread, kept for its next gemm, in huge pages if the system has them.
class ScratchBuffer {
 public:
  char* at_least(size_t bytes) {
    constexpr size_t page = 1 << 21;
    if (bytes > size_) {
      std::free(at_);
      size_ = round_up(bytes, page);
      at_ = static_cast<char*>(std::aligned_alloc(page, size_));
      if (!at_) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
      madvise(at_, size_, MADV_HUGEPAGE);
#endif
    }
    return at_;
  }
  ~ScratchBuffer() { std::free(at_); }

 private:
  char* at_ = nullptr;
  size_t size_ = 0;
};

}  // namespace workhorse

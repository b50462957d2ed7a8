// A heap for the large tensors of training, in one reserved range of addresses.
//
// The C library's heap scatters them. `posix_memalign` requests more than it returns and frees both ends, and
// small objects settle in those ends. A block that is freed then has no space for another of its size.
// Only large blocks are in this heap, so freed blocks merge again, and the next step finds their memory
// where the last step left it. Best fit; while `keep` is set, freed memory stays resident.
#pragma once

#ifdef __linux__
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#endif

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace workhorse::heap {

class TensorHeap {
 public:
  // Sizes in a block: the header before its data, and a gap. The gap keeps tensors of equal size from
  // beginning at equal offsets into pages, where their cache lines would evict each other.
  static constexpr size_t kLine = 64, kHeader = kLine, kApart = 4 * kLine;

  // Reserves addresses for twice the memory of the machine; pages use memory only once they are written.
  // False if that is not possible, or would count against a limit.
  bool reserve() {
    if (begin_ != 0) return true;
#ifdef __linux__
    rlimit limit{};
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur != RLIM_INFINITY) return false;
    page_ = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t size = 2 * page_ * static_cast<size_t>(sysconf(_SC_PHYS_PAGES));
    void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return false;
    begin_ = top_ = reinterpret_cast<uintptr_t>(at);
    end_ = begin_ + size;
    return true;
#else
    return false;
#endif
  }

  bool holds(const void* data) const {
    const auto at = reinterpret_cast<uintptr_t>(data);
    return begin_ <= at && at < end_;
  }

  // Memory for `bytes`; null if the range is full.
  void* take(size_t bytes) {
    const size_t size = (bytes + kLine - 1) / kLine * kLine + kHeader + kApart;
    const std::lock_guard<std::mutex> guard(lock_);
    uintptr_t at = 0;
    if (const auto fit = by_size_.lower_bound({size, 0}); fit != by_size_.end()) {
      const auto [length, place] = *fit;
      at = place;
      remove(place, length);
      if (length > size) add(place + size, length - size);
    } else {
      at = top_;
      if (const auto last = by_place_.rbegin();
          last != by_place_.rend() && last->first + last->second == top_) {
        at = last->first;  // the free block at the end grows
      }
      if (end_ - at < size) return nullptr;
      if (at != top_) remove(at, top_ - at);
      top_ = at + size;
    }
    *reinterpret_cast<size_t*>(at) = size;
    return reinterpret_cast<void*>(at + kHeader);
  }

  void free(void* data) {
    uintptr_t at = reinterpret_cast<uintptr_t>(data) - kHeader;
    const std::lock_guard<std::mutex> guard(lock_);
    size_t size = *reinterpret_cast<size_t*>(at);
    if (const auto next = by_place_.lower_bound(at);
        next != by_place_.end() && next->first == at + size) {
      size += next->second;
      remove(next->first, next->second);
    }
    if (const auto next = by_place_.lower_bound(at); next != by_place_.begin()) {
      if (const auto before = std::prev(next); before->first + before->second == at) {
        at = before->first;
        size += before->second;
        remove(at, before->second);
      }
    }
    add(at, size);
    if (!keeps_) give_back(at, size);
  }

  // Sets whether freed memory stays resident; if not, memory that is free now is also returned to the system.
  void keep(bool keeps) {
    {
      const std::lock_guard<std::mutex> guard(lock_);
      keeps_ = keeps;
    }
    if (!keeps) give_back();
  }

  // Returns the memory that is free now to the system; its addresses stay reserved.
  void give_back() {
    const std::lock_guard<std::mutex> guard(lock_);
    for (const auto& [place, size] : by_place_) give_back(place, size);
  }

 private:
  void add(uintptr_t place, size_t size) {
    by_place_[place] = size;
    by_size_.insert({size, place});
  }

  void remove(uintptr_t place, size_t size) {
    by_place_.erase(place);
    by_size_.erase({size, place});
  }

  void give_back(uintptr_t place, size_t size) const {
    const uintptr_t first = (place + page_ - 1) / page_ * page_, last = (place + size) / page_ * page_;
#ifdef __linux__
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
#endif
  }

  std::mutex lock_;
  size_t page_ = 1;
  uintptr_t begin_ = 0, top_ = 0, end_ = 0;
  bool keeps_ = false;
  std::map<uintptr_t, size_t> by_place_;
  std::set<std::pair<size_t, uintptr_t>> by_size_;
};

}  // namespace workhorse::heap

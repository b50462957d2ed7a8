// Threads that work through a list of stages together, within one parallel region.
//
// The units of a stage are divided evenly. A thread that has finished its own units takes those of other threads, which
// helps a thread that other programs keep waiting. All threads wait between stages that depend on each other. They spin
// for a while, because the others are expected soon, and then sleep, because something else has their cores. A thread
// that had to sleep spins half as long the next time, and one that did not spins a little longer. If threads of several
// programs all spun for long, they would keep the cores from the threads that they wait for.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace workhorse {

// Signals the core that this thread spins.
inline void pause() {
#ifdef __SSE2__
  _mm_pause();
#endif
}

class Team {
 public:
  // `shares` of the work are done by at most that number of threads; each thread has some of them.
  Team(int64_t shares, int64_t stages) : shares_(shares), next_(new std::atomic<int64_t>[shares * stages]) {
    for (int64_t i = 0; i < shares * stages; i++) next_[i].store(0, std::memory_order_relaxed);
  }

  // Calls work(unit) for the remaining units of the stage, this thread's own units first.
  template <class F>
  void divide(int64_t stage, int64_t share, int64_t units, const F& work) {
    for (int64_t i = 0; i < shares_; i++) {
      const int64_t of = (share + i) % shares_, begin = units * of / shares_, end = units * (of + 1) / shares_;
      std::atomic<int64_t>& next = next_[stage * shares_ + of];
      for (int64_t unit; (unit = begin + next.fetch_add(1, std::memory_order_relaxed)) < end;) work(unit);
    }
  }

  // Returns once all shares have arrived; `mine` of them arrive with this thread.
  void wait(int64_t mine) {
    const int32_t round = round_.load(std::memory_order_acquire);
    if (come_.fetch_add(mine, std::memory_order_acq_rel) + mine == shares_) {
      come_.store(0, std::memory_order_relaxed);
      // Sequentially consistent: libstdc++ wakes no thread if it sees none asleep. A weaker store may become visible
      // only after that check, to a thread that fell asleep in between.
      round_.store(round + 1, std::memory_order_seq_cst);
      round_.notify_all();
      return;
    }
    static thread_local int looks = kMostLooks;
    for (int i = 0; i < looks; i++) {
      if (round_.load(std::memory_order_acquire) != round) {
        looks = std::min(kMostLooks, looks + looks / 16);
        return;
      }
      pause();
    }
    looks = std::max(kFewestLooks, looks / 2);
    round_.wait(round, std::memory_order_seq_cst);
  }

 private:
  static constexpr int kFewestLooks = 100, kMostLooks = 4000;  // 2 to 90 microseconds

  const int64_t shares_;
  const std::unique_ptr<std::atomic<int64_t>[]> next_;  // (stages, shares)
  alignas(64) std::atomic<int64_t> come_{0};
  alignas(64) std::atomic<int32_t> round_{0};
};

}  // namespace workhorse

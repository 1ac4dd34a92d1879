// Crew: how tasks reach threads that stand by. The leader publishes a call as one word, threads pull task numbers from
// it, and nothing sleeps: a call costs well under a microsecond, where waking a thread costs tens.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "threads/threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dsacore {

class Crew {
 public:
  using Body = FunctionRef<void(int64_t task, int worker)>;
  static constexpr int64_t kMostTasks = int64_t(1) << 23;  ///< of one call

  /// Leader: threads that come may stay until `close`.
  void open() { open_.store(true, std::memory_order_release); }
  void close() { open_.store(false, std::memory_order_release); }

  /// Any other thread: works until the leader closes the crew.
  void stand_by(int worker) {
    for (int idle = 0; open_.load(std::memory_order_acquire);) {
      idle = pull(worker) ? 0 : idle + 1;
      relax(idle);
    }
  }

  /// Leader: runs tasks 0..tasks-1 with whoever stands by; at most `kMostTasks`.
  void call(int64_t tasks, const Body& body, int worker) {
    body_.store(&body, std::memory_order_relaxed);
    finished_.store(0, std::memory_order_relaxed);
    ++calls_;
    ticket_.store(calls_ << kCallShift | uint64_t(tasks) << kTasksShift, std::memory_order_release);
    while (pull(worker)) {
    }
    for (int idle = 0; finished_.load(std::memory_order_acquire) < tasks; ++idle) relax(idle);
  }

 private:
  // A call is one word, so that a task number can never be taken for a task of another call: [call 16 | tasks 24 | next
  // 24]. `next` runs past `tasks` by at most one a thread.
  static constexpr int kTasksShift = 24, kCallShift = 48;
  static constexpr uint64_t kNumber = (uint64_t(1) << 24) - 1;

  static bool has_task(uint64_t ticket) { return (ticket & kNumber) < (ticket >> kTasksShift & kNumber); }

  /// Runs one task, if there is one. Who holds a task number keeps its call from ending, so the body is the right one.
  bool pull(int worker) {
    if (!has_task(ticket_.load(std::memory_order_acquire))) return false;
    const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
    if (!has_task(ticket)) return false;
    (*body_.load(std::memory_order_relaxed))(int64_t(ticket & kNumber), worker);
    finished_.fetch_add(1, std::memory_order_release);
    return true;
  }

  /// Spins a little, then lets others run, then sleeps: a leader that waits for another rank must not cost a core a
  /// thread.
  static void relax(int idle) {
    constexpr int kSpins = 2000;
    constexpr int kYields = 200;
    if (idle > kSpins + kYields) return std::this_thread::sleep_for(std::chrono::microseconds(50));
    if (idle > kSpins) return std::this_thread::yield();
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int64_t> finished_{0};
  alignas(64) std::atomic<const Body*> body_{nullptr};
  std::atomic<bool> open_{false};
  uint64_t calls_ = 0;  ///< of the leader alone
};

}  // namespace dsacore

// Threads without oneTBB (the option DSACORE_THREAD_TEAM): std::threads parked between calls. Every lock and wait is
// visible to the thread sanitizer, which a distribution's oneTBB is not.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <stop_token>
#include <thread>
#include <vector>

#include "threads/threads.h"

namespace dsacore {

struct Threads::Team {
  /// The caller is worker 0; the team's own threads are 1..count-1.
  explicit Team(int count) {
    workers.reserve(size_t(count - 1));
    for (int worker = 1; worker < count; ++worker) {
      workers.emplace_back([this, worker](std::stop_token stop) { serve(stop, worker); });
    }
  }

  void serve(std::stop_token stop, int worker) {
    uint64_t served = 0;
    std::unique_lock lock(mutex);
    while (wake.wait(lock, stop, [&] { return call != served; })) {
      served = call;
      const auto* work = pull;
      lock.unlock();
      (*work)(worker);
      lock.lock();
      if (--busy == 0) idle.notify_one();
    }
  }

  /// Runs `work(worker)` once on every thread of the team, the caller's included.
  void run(FunctionRef<void(int worker)> work) {
    {
      const std::lock_guard lock(mutex);
      pull = &work;
      busy = int(workers.size());
      ++call;
    }
    wake.notify_all();
    work(0);
    std::unique_lock lock(mutex);
    idle.wait(lock, [&] { return busy == 0; });
  }

  std::mutex mutex;
  std::condition_variable_any wake;
  std::condition_variable idle;
  uint64_t call = 0;                                    ///< calls so far; a thread that has served fewer has work
  const FunctionRef<void(int worker)>* pull = nullptr;  ///< of the call in progress
  int busy = 0;                                         ///< the team's own threads that have not finished it
  std::vector<std::jthread> workers;                    ///< last, so that they stop before what they use is gone
};

Threads::Threads(int count) : count_(std::max(count, 1)) {
  if (count_ > 1) team_ = std::make_unique<Team>(count_);
}

Threads::~Threads() = default;

void Threads::for_each(int64_t tasks, FunctionRef<void(int64_t task, int worker)> body) {
  const auto run = [&](int64_t task, int worker) {
    body(task, worker);
    if (progress_ != nullptr) progress_(progress_context_);
  };
  if (count_ == 1 || tasks <= 1) {
    for (int64_t task = 0; task < tasks; ++task) run(task, 0);
    return;
  }
  std::atomic<int64_t> next{0};
  team_->run([&](int worker) {
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) run(task, worker);
  });
}

}  // namespace dsacore

// std::threads parked between calls. Every lock and wait is visible to the thread sanitizer, which a distribution's
// oneTBB is not.
#include <condition_variable>
#include <mutex>
#include <stop_token>
#include <thread>
#include <vector>

#include "threads/team.h"

namespace dsacore {
namespace {

class StdTeam final : public Threads::Team {
 public:
  /// The caller is worker 0; the team's own threads are 1..count-1.
  explicit StdTeam(int count) {
    members_.reserve(size_t(count - 1));
    for (int worker = 1; worker < count; ++worker) {
      members_.emplace_back([this, worker](const std::stop_token& stop) { serve(stop, worker); });
    }
  }

  void run(FunctionRef<void(int worker)> leader, FunctionRef<void(int worker)> stand_by) override {
    {
      const std::lock_guard lock(mutex_);
      stand_by_ = &stand_by;
      busy_ = int(members_.size());
      ++call_;
    }
    wake_.notify_all();
    leader(0);
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [&] { return busy_ == 0; });
  }

 private:
  void serve(const std::stop_token& stop, int worker) {
    uint64_t served = 0;
    std::unique_lock lock(mutex_);
    while (wake_.wait(lock, stop, [&] { return call_ != served; })) {
      served = call_;
      const auto* stand_by = stand_by_;
      lock.unlock();
      (*stand_by)(worker);
      lock.lock();
      if (--busy_ == 0) idle_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable_any wake_;
  std::condition_variable idle_;
  uint64_t call_ = 0;                                        ///< calls so far; a thread that has served fewer has work
  const FunctionRef<void(int worker)>* stand_by_ = nullptr;  ///< of the call in progress
  int busy_ = 0;                                             ///< the team's own threads that have not finished it
  std::vector<std::jthread> members_;                        ///< last, so that they stop before what they use is gone
};

}  // namespace

std::unique_ptr<Threads::Team> Threads::Team::make(int count) { return std::make_unique<StdTeam>(count); }

}  // namespace dsacore

// Threads on oneTBB: an arena of `count` threads whose members pull task numbers from one counter. thread_team.cpp is
// the same without oneTBB.
#include "threads/threads.h"

#include <tbb/global_control.h>
#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <tbb/partitioner.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <atomic>
#include <optional>

namespace dsacore {

struct Threads::Team {
  explicit Team(int count) : arena(count) {
    // oneTBB starts no more threads than there are cores unless told to; a count asked for is a count given. The least
    // limit in force counts, so a limit is set only where it is above oneTBB's own, and so never takes threads from
    // others.
    if (count > tbb::info::default_concurrency()) {
      limit.emplace(tbb::global_control::max_allowed_parallelism, size_t(count));
    }
  }

  std::optional<tbb::global_control> limit;
  tbb::task_arena arena;
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
  // Tasks start in ascending order, each on the first thread that is free; a thread that comes late finds nothing left.
  std::atomic<int64_t> next{0};
  const auto pull = [&](int) {
    const int worker = tbb::this_task_arena::current_thread_index();
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) run(task, worker);
  };
  const int pullers = int(std::min<int64_t>(count_, tasks));
  team_->arena.execute([&] { tbb::parallel_for(0, pullers, pull, tbb::simple_partitioner()); });
}

}  // namespace dsacore

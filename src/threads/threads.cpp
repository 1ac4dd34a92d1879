#include "threads/threads.h"

#include <algorithm>

#include "threads/crew.h"
#include "threads/team.h"

namespace dsacore {
namespace {

using Clock = std::chrono::steady_clock;

void add_busy(std::vector<BusySpan>& spans, Clock::time_point begin) {
  constexpr std::chrono::microseconds kApart(1);
  const Clock::time_point end = Clock::now();
  if (!spans.empty() && begin - spans.back().end < kApart) {
    spans.back().end = end;
  } else {
    spans.push_back({begin, end});
  }
}

}  // namespace

Threads::Threads(int count) : count_(std::max(count, 1)) {
  if (count_ == 1) return;
  crew_ = std::make_unique<Crew>();
  team_ = Team::make(count_);
}

Threads::~Threads() = default;

void Threads::together(FunctionRef<void()> work) {
  if (count_ == 1 || leader_ != kNoLeader) return work();
  crew_->open();
  team_->run(
      [&](int worker) {
        leader_ = worker;
        work();
        leader_ = kNoLeader;
        crew_->close();
      },
      [&](int worker) { crew_->stand_by(worker); });
}

void Threads::for_each(int64_t tasks, FunctionRef<void(int64_t task, int worker)> body) {
  const auto run = [&](int64_t task, int worker) {
    const Clock::time_point begin = busy_ != nullptr ? Clock::now() : Clock::time_point();
    body(task, worker);
    if (busy_ != nullptr) add_busy((*busy_)[size_t(worker)], begin);
    if (progress_ != nullptr) progress_(progress_context_);
  };
  if (count_ == 1 || tasks <= 1) {
    for (int64_t task = 0; task < tasks; ++task) run(task, 0);
    return;
  }
  together([&] {
    for (int64_t first = 0; first < tasks; first += Crew::kMostTasks) {
      const auto part = [&](int64_t task, int worker) { run(first + task, worker); };
      crew_->call(std::min(Crew::kMostTasks, tasks - first), part, leader_);
    }
  });
}

}  // namespace dsacore
